"""YAML is read as kubectl reads it. The values in the tables are what sigs.k8s.io/yaml v1.6.0 gives for them."""

import pytest

from operators.documents import MOST_NODES, Unreadable, read

SCALARS = {
    "2e-4": 2e-4,
    "1e-6": 1e-6,
    "010": 8,
    "08": 8,
    "0o17": 15,
    "0x1F": 31,
    "0b11": 3,
    "-0b11": -3,
    "1_000": 1000,
    "+5": 5,
    ".5": 0.5,
    "5.": 5,
    "1e400": "1e400",
    "12:30": "12:30",
    "2025-09-01": "2025-09-01",
    "2025-9-1": "2025-9-1",
    "2025-09-01T10:00:00Z": "2025-09-01T10:00:00Z",
    "1.2.3": "1.2.3",
    "0b2": "0b2",
    "0o8": "0o8",
    "99999999999999999999": 1e20,
    "18446744073709551615": 18446744073709551615,
    "+9223372036854775808": 9223372036854775808.0,
    "no": False,
    "nO": "nO",
    "y": True,
    "off": False,
    "on": True,
    "~": None,
    "'010'": "010",
    '"1e-6"': "1e-6",
    "!!str 010": "010",
    "!!float 1": 1,
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_a_scalar_has_the_type_that_kubectl_gives_it(text, value):
    (document,) = read(f"a: {text}\n")
    assert document.value == {"a": value}
    assert type(document.value["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "key"), {"1": "1", "1.5": "1.5", "0x10": "16", "yes": "true", "2025-01-01": "2025-01-01"}.items()
)
def test_keys_become_strings(text, key):
    assert read(f"{text}: a\n")[0].value == {key: "a"}


def test_own_keys_win_over_merged_ones_and_the_first_merged_mapping_over_later_ones():
    text = "a: &a {x: 1, z: 1}\nb: &b {x: 2, w: 2}\nc: {<<: [*a, *b], z: 3}\n"
    assert read(text)[0].value["c"] == {"x": 1, "w": 2, "z": 3}


REFUSED = {
    "a: 1\nb: 2\na: 3\n": (3, 'key "a" is given twice; remove one'),
    "a: {yes: 1, 'true': 2}\n": (1, 'key "true" is given twice; remove one'),
    "a: &x [*x]\n": (1, "an alias that contains itself"),
    "a: 1\nb: .inf\n": (2, ".inf has no place in JSON; write a finite number"),
    "a: !!binary aGk=\n": (1, "tag !!binary is not understood; write a plain value"),
    "a: !!python/name:os.system ''\n": (1, "tag !!python/name:os.system is not understood; write a plain value"),
    'a: "ok\\ud83d"\n': (1, "half a surrogate pair is no character"),
    "? [a]\n: b\n": (1, "a key must be a string"),
    "a: *nowhere\n": (1, "not YAML: found undefined alias 'nowhere'"),
    "a: b\n  c: d\n": (2, "not YAML: mapping values are not allowed here"),
    "[" * 500: (1, "nested too deeply"),
    "a: {<<: 5}\n": (1, "only a map can be merged into another"),
    "a: {18446744073709551615: b}\n": (1, "a key must be a string"),
    "a: 1\n--- {b: 2}\n": (2, "only a comment may follow ---; put the rest on a line of its own"),
    "%YAML 1.1\n---\na: 1\n": (1, "YAML directives are not understood; remove the line"),
    "{a: 1}\n": (1, "kubectl takes a file that begins with { for JSON; put --- above it"),
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_has_no_single_meaning_is_refused_with_its_line(text, problem):
    with pytest.raises(Unreadable) as error:
        read(text)
    assert (error.value.line, str(error.value)) == problem


def test_aliases_cannot_blow_up_memory():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(Unreadable, match=f"more than {MOST_NODES} values"):
        read("\n".join(lines))


def test_a_file_may_hold_several_documents_and_empty_ones_do_not_count():
    documents = read("---\na: 1\n---\n# nothing\n---\nb: 2\n...\n")
    assert [document.value for document in documents] == [{"a": 1}, {"b": 2}]
    assert [document.line(("b",)) for document in documents][1] == 6


@pytest.mark.parametrize("text", ['{"a": 1}', "--- # first\n{a: 1}\n", "\ufeffa: 1.0\n", "a: 1e0\n---"])
def test_a_file_is_cut_and_read_as_kubectl_does(text):
    (document,) = read(text)
    assert document.value == {"a": 1}
    assert type(document.value["a"]) is int


def test_a_document_knows_where_and_how_each_value_was_written():
    (document,) = read("spec:\n  rate: 2e-4\n  list:\n  - x: 'a'\n")
    assert document.line(("spec", "rate")) == 2
    assert document.written(("spec", "rate")) == "2e-4"
    assert document.line(("spec", "list", 0, "x")) == 4
    assert document.written(("spec", "list", 0, "x")) is None
    assert document.line(("spec", "missing")) == 2


@pytest.mark.parametrize("text", ["9" * 5000, "-" + "9" * 5000, "9" * 21])
def test_a_number_of_any_length_is_read_without_converting_it_to_one_first(text):
    (document,) = read(f"a: {text}\n")
    assert isinstance(document.value["a"], str | float | int)


def test_a_json_file_of_endless_depth_is_refused():
    with pytest.raises(Unreadable):
        read('{"a":' * 100_000)
