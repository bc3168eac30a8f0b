from pipeline.assignment import Assignments, Candidate
from pipeline.messages import EvaluationRequest
from pipeline.versions import Version


def test_the_least_busy_writer_that_has_not_passed_the_policy_is_asked():
    assignments = Assignments({4: Version(1, 4)})
    candidates = {
        "A": Candidate(Version(1, 5), leases=0),
        "B": Candidate(Version(1, 4), leases=3),
        "C": Candidate(None, leases=2),
    }
    assignments.assign(candidates, newest=Version(1, 5))
    assert assignments.current == EvaluationRequest(4, Version(1, 4), "C")


def test_the_choice_stands_while_the_writer_lives_and_passes_on_when_it_is_lost():
    assignments = Assignments({4: Version(1, 4)})
    both = {"A": Candidate(Version(1, 3), 0), "B": Candidate(Version(1, 3), 1)}
    assignments.assign(both, newest=None)
    assignments.assign({"A": Candidate(Version(1, 4), 9), "B": Candidate(Version(1, 3), 0)}, newest=None)
    assert assignments.current and assignments.current.writer == "A"
    assignments.assign({"B": both["B"]}, newest=None)
    assert assignments.current and assignments.current.writer == "B"


def test_if_every_writer_has_passed_the_policy_the_newest_is_evaluated_instead():
    assignments = Assignments({4: Version(1, 4)})
    assignments.assign({"A": Candidate(Version(1, 6), 0)}, newest=Version(1, 6))
    assert assignments.current == EvaluationRequest(4, Version(1, 6), "A")


def test_requests_are_served_one_at_a_time_in_order():
    assignments = Assignments()
    assignments.request(2, Version(1, 2))
    assignments.request(4, Version(1, 4))
    candidates = {"A": Candidate(Version(1, 2), 0)}
    assignments.assign(candidates, newest=Version(1, 4))
    assert assignments.current and assignments.current.step == 2
    assignments.settle(2)
    assignments.assign(candidates, newest=Version(1, 4))
    assert assignments.current and assignments.current.step == 4
    assignments.settle(4)
    assignments.assign(candidates, newest=Version(1, 4))
    assert assignments.current is None


def test_without_a_writer_the_request_waits():
    assignments = Assignments({4: Version(1, 4)})
    assignments.assign({}, newest=Version(1, 9))
    assert assignments.current is None
    assert assignments.pending == {4: Version(1, 4)}
