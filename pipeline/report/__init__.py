"""`miles report RUN -o FILE`: one self-contained HTML page about a run, to read, to keep and to send.

history reads the run from its store → summary, configuration, curves and rollouts choose what is shown, each a part of
one JSON object → page puts it into page.html, whose script page.js draws it. The page needs no network and no server.
"""
