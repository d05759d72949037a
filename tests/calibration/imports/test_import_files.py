"""Files are known by what is in them, and what they are not is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_files import (
    aiperf_line,
    guidellm_timings,
    guidellm_v2,
    inference_perf_request,
    sglang,
    vllm_bench,
    vllm_bench_plain,
    write,
)

from calibration.imports import (
    NAMES,
    ImportFileError,
    import_files,
    import_stated,
    load_stated,
    save_stated,
    source,
    validate_stated,
)
from calibration.imports.lengths import length_of, shapes_of
from simulator.profile import Profile


@pytest.mark.parametrize(
    ("value", "tool"),
    [
        (vllm_bench(), "vllm bench serve"),
        (sglang(), "SGLang bench_serving"),
        (aiperf_line(0), "AIPerf"),
        ([inference_perf_request(0.0)], "inference-perf"),
    ],
)
def test_the_name_of_a_file_says_nothing(tmp_path: Path, value: object, tool: str) -> None:
    for name in ("guidellm_report_v2.json", "notes.txt"):
        assert import_files([write(tmp_path, name, value)]).server["source"] == tool


def test_levels_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{clients}.json", vllm_bench(max_concurrency=clients)) for clients in (8, 1, 4)]
    assert [level.workload.concurrency for level in import_files(paths).levels] == [8, 1, 4]


def test_files_of_two_models_are_no_run(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{name}.json", vllm_bench(model_id=name)) for name in ("a", "b")]
    with pytest.raises(ImportFileError, match="measured b, the files before it a"):
        import_files(paths)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ('{"a": 1', "line 1: not JSON .* is the file whole"),
        ('{"a": 1}\n{"b": ', "line 2: not JSON"),
        ("a,b\n1,2\n", "no result file of vLLM bench"),
        ("a: [1", "neither JSON nor YAML"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no result file"),
        ("{}", "no result file"),
        ('{"schema_version": 1, "source": "measured", "started_at": ""}', "a run of capsim already"),
    ],
)
def test_a_file_that_is_none_is_told_in_one_line(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ImportFileError, match=what) as caught:
        import_files([path])
    assert "\n" not in str(caught.value)


def test_folders_missing_and_binary_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\x89PNG\xff\xfe")
    for path, what in (
        (tmp_path, "a folder"),
        (tmp_path / "none", "no such file"),
        (tmp_path / "b", "not a text file"),
    ):
        with pytest.raises(ImportFileError, match=what):
            import_files([path])


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "r.json", vllm_bench())
    monkeypatch.setattr(source, "LARGEST", 100)
    with pytest.raises(ImportFileError, match="are read"):
        import_files([path])


def test_a_format_may_be_insisted_on(tmp_path: Path) -> None:
    path = write(tmp_path, "r.json", vllm_bench())
    assert import_files([path], "vllm-bench").levels
    with pytest.raises(ImportFileError, match="not a file of GuideLLM"):
        import_files([path], "guidellm")
    with pytest.raises(ImportFileError, match=f"known are {', '.join(NAMES)}"):
        import_files([path], "excel")


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_json_value_whatever_ends_in_anything_but_a_line(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    path = write(tmp_path_factory.mktemp("any"), "x.json", value)
    with pytest.raises(ImportFileError):
        import_files([path])


def spoil(value: Any, data: st.DataObject) -> Any:
    """`value` with one field, at any depth, that is not as it should be."""
    inside = [key for key, part in value.items() if isinstance(part, dict)] if isinstance(value, dict) else []
    if isinstance(value, list) and value:
        return [spoil(value[0], data), *value[1:]]
    if inside and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(inside)))
        return value | {key: spoil(value[key], data)}
    lists = [key for key, part in value.items() if isinstance(part, list) and part and isinstance(part[0], dict)]
    if lists and data.draw(st.booleans()):
        return value | {lists[0]: spoil(value[lists[0]], data)}
    bad = [None, "x", -1, float("nan"), float("inf"), [], {}, [None], {"a": 1}, 0, 10**30, 1e300, True]
    return value | {data.draw(st.sampled_from(sorted(value) or ["x"])): data.draw(st.sampled_from(bad))}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_result_with_any_field_spoilt_is_read_or_told(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    request = {"info": {"timings": guidellm_timings(1.7e9)}, "prompt_tokens": 500, "output_tokens": 128}
    made: list[Any] = [
        vllm_bench(server_queue_times=[0.0] * 3),
        vllm_bench_plain(),
        sglang(),
        aiperf_line(0),
        [inference_perf_request(0.0)],
        guidellm_v2({"successful": [request]}, 1, {"type_": "concurrent", "streams": 2}),
    ]
    path = write(tmp_path_factory.mktemp("spoilt"), "x.json", spoil(data.draw(st.sampled_from(made)), data))
    for read in (import_files, import_stated):
        try:
            read([path])
        except ImportFileError as error:
            said = str(error)
            assert "\n" not in said


def test_figures_are_kept_and_compared_with_a_prediction(tmp_path: Path, profile: Profile) -> None:
    (level,) = import_stated([write(tmp_path, "r.json", vllm_bench_plain())])
    save_stated([level], tmp_path / "figures.json")
    kept = load_stated(tmp_path / "figures.json")
    assert kept == [level]
    (compared,) = validate_stated(kept, profile).levels
    assert set(compared.errors) == {figure.metric for figure in level.figures}


def test_a_sample_of_four_times_the_requests_is_known_twice_as_well(tmp_path: Path) -> None:
    def uncertainty(completed: int) -> float:
        result = vllm_bench_plain(completed=completed, std_ttft_ms=20.0)
        (level,) = import_stated([write(tmp_path, "r.json", result)])
        return next(figure.uncertainty for figure in level.figures if figure.metric == "mean_ttft")

    assert uncertainty(100) == pytest.approx(uncertainty(25) / 2)


def test_shapes_keep_the_lengths_that_were_recorded() -> None:
    assert [str(shape) for shape in shapes_of([(100, 20)] * 5)[0]] == ["100/20"]
    two, _ = shapes_of([(100, 20)] * 3 + [(2000, 20)])
    assert [(str(shape), shape.weight) for shape in two] == [("100/20", 3.0), ("2000/20", 1.0)]
    even, _ = shapes_of([(prompt, 20) for prompt in range(90, 111)])
    assert [str(shape) for shape in even] == ["90-110/20"]
    skewed, notes = shapes_of([(10 + number % 7, 2 + number**3 // 1000) for number in range(100)])
    assert len(skewed) == 4
    assert "4 groups" in notes[0]


def test_a_stated_mean_and_spread_become_the_uniform_length_with_both() -> None:
    length = length_of(1000, 57.7)
    assert (length.low, length.high) == (900, 1100)
    assert str(length_of(0.3)) == "1"
