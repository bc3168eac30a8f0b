"""The RLJob resource, v1alpha1: what a user writes, with its defaults and limits. The one source of the reference
documentation (`operators.schema`) and of validation; rules that join several fields are in `operators.rules`.

A field whose default is None takes the one that its text names; `operators.resolve` chooses it from other fields.
"""

from operators.spec.job import API_VERSION, KIND, RLJob

__all__ = ["API_VERSION", "KIND", "RLJob"]
