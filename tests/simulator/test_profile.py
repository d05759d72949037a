"""A profile reads back as it was saved, and every fault of a file is told in one line with its place and its remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.engine.step_time import HostTime, StepTime
from simulator.flags.vllm_flags import parse_size
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.profile import Coefficient, Coefficients, MeasuredRange, Profile, ProfileError
from simulator.yaml_file import MAX_BYTES


def workload(clients: int = 4, prompt: int = 512, output: int = 128) -> Workload:
    return Workload(ClosedLoop(clients), (Shape(Length.fixed(prompt), Length.fixed(output)),), num_prompts=100)


def complaint(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def test_holds_what_the_simulator_needs(profile: Profile) -> None:
    assert profile.step_time == StepTime(0.01, per_sequence=2e-5, per_kv_token=1e-8, per_prefill_token=5e-5)
    assert profile.host_time == HostTime(per_request=0.002)
    assert profile.engine_flags.num_gpu_blocks == 1001
    assert profile.engine_flags.engine_version == "0.32.0"
    assert profile.coefficients.step_time["per_prefill_token"].origin == "assumed"


def test_saved_and_loaded_it_is_the_same(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "first.yaml")
    again = Profile.load(tmp_path / "first.yaml")
    again.save(tmp_path / "second.yaml")
    assert again == profile
    assert (tmp_path / "first.yaml").read_bytes() == (tmp_path / "second.yaml").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.yaml", "first.yaml", "second.yaml"]


@given(st.floats(min_value=0, max_value=1e6))
def test_every_float_keeps_its_bits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.getbasetemp() / "float.yaml"
    built(Coefficient(value=value)).save(path)
    assert Profile.load(path).step_time.per_sequence == value


def built(per_sequence: Coefficient) -> Profile:
    return Profile(
        name="built",
        model="m",
        engine_version="0.27.1",
        engine_flags=EngineFlags(engine_version="0.32.0"),
        coefficients=Coefficients(step_time={"constant": Coefficient(value=0.01), "per_sequence": per_sequence}),
        measured_range=MeasuredRange(
            concurrency=(1, 2), sequences=(1, 2), context_tokens=(1, 2), prompt_chunk_tokens=(1, 2)
        ),
    )


def test_the_version_of_the_engine_is_stated_once() -> None:
    assert built(Coefficient(value=0.0)).engine_flags.engine_version == "0.27.1"


def test_flags_change_under_the_names_of_vllm(profile: Profile) -> None:
    flags = profile.with_flags(**{"max-num-seqs": 8, "async_scheduling": False})
    assert flags == replace(profile.engine_flags, max_num_seqs=8, async_scheduling=False)
    with pytest.raises(FlagError, match="did you mean 'max-num-seqs'"):
        profile.with_flags(**{"max-num-seq": 8})
    with pytest.raises(FlagError, match="max_num_seqs: must be a whole number, got True"):
        profile.with_flags(max_num_seqs=True)


def test_memory_becomes_blocks(profile: Profile) -> None:
    gibibyte = profile.with_flags(kv_cache_memory="1GiB")
    assert gibibyte.num_gpu_blocks == 2**30 // (16 * 65536)
    assert profile.with_flags(kv_cache_memory_bytes="1GiB", block_size=32).num_gpu_blocks == 2**30 // (32 * 65536)
    assert profile.with_flags(kv_cache_memory_bytes="1G", num_gpu_blocks_override=77).num_gpu_blocks == 77
    unknown = profile.model_copy(update={"kv_bytes_per_token": None})
    with pytest.raises(FlagError, match="add kv_bytes_per_token"):
        unknown.with_flags(kv_cache_memory="1GiB")


def test_another_block_size_leaves_the_memory_as_it_is(profile: Profile) -> None:
    assert profile.with_flags(block_size=128).num_gpu_blocks == 1001 * 16 // 128


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6569114112", 6569114112),
        ("10G", 10 * 2**30),
        ("10g", 10 * 10**9),
        ("8k", 8000),
        ("8K", 8192),
        ("6.12GiB", int(6.12 * 2**30)),
        ("1.5GB", 1_500_000_000),
        ("1_000", 1000),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "10X", "1e3", "10 G B", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_size(text)


def test_says_what_leaves_the_measured_range(profile: Profile) -> None:
    assert profile.outside_range(workload()) == []
    assert profile.outside_range(workload(clients=16)) == ["concurrency 16, measured 1 to 8"]
    long = profile.outside_range(workload(prompt=4096))
    assert long == ["tokens of a request 4,224, measured 64 to 1,280"]
    assert profile.outside_range(workload(prompt=16)) == ["prompt tokens in a step 16, measured 64 to 2,048"]
    larger = profile.with_flags(max_num_batched_tokens=8192)
    assert "prompt tokens in a step 4,096, measured 64 to 2,048" in profile.outside_range(workload(prompt=4096), larger)


def test_an_open_loop_is_judged_by_what_ran_at_once(profile: Profile) -> None:
    load = replace(workload(), arrivals=OpenLoop(3.0))
    assert profile.outside_range(load) == []
    assert profile.outside_range(load, peak_running=9) == ["sequences in a step 9, measured 1 to 8"]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("value: 0.01,", "value: 10 ms,", 15, "constant.value must be a number (seconds), got '10 ms'; write 0.01"),
        ("value: 0.01,", "value: .nan,", 15, "constant.value must be a finite number"),
        ("value: 0.01,", "value: -1,", 15, "constant.value must be greater than or equal to 0"),
        (
            "value: 0.01,",
            "valeu: 0.01,",
            15,
            "unknown key coefficients.step_time.constant.valeu; did you mean 'value'?",
        ),
        ("value: 0.01,", "value: 1, value: 2,", 15, "'value' is given twice"),
        ("low: 0.00998", "low: 1", 15, "the lower bound 1 lies above the upper bound 0.01002"),
        ("per_sequence:", "per_sequenc:", 16, "unknown coefficient; did you mean 'per_sequence'?"),
        ("    constant:", "    per_prefill_attention:", 14, "the coefficient 'constant' is missing"),
        ("origin: assumed", "origin: guessed", 18, "origin must be 'measured' or 'assumed', got 'guessed'"),
        ("max_num_seqs: 32", "max_num_seq: 32", 8, "max_num_seq: not an engine flag that capsim models; did you mean"),
        ("max_num_seqs: 32", "max_num_seqs: many", 8, "max_num_seqs: 'many' is not a size"),
        ("max_num_seqs: 32", "max_num_seqs: 3.2", 8, "max_num_seqs: must be a whole number, got 3.2"),
        ("max_num_seqs: 32", "max_num_seqs: 4096", 9, "--max-num-batched-tokens (2048) must not be smaller"),
        ("  max_num_seqs: 32\n", "", 7, "max_num_seqs is missing; a profile states the flags"),
        ("engine_version: 0.32.0", "engine_version: 0.32", 5, "engine_version must be text in quotes"),
        ("schema_version: 1", "schema_version: 2", 1, "schema_version: 2 was written by a newer capsim"),
        ("concurrency: [1, 8]", "concurrency: [8, 1]", 22, "a range is written [low, high]"),
        ("concurrency: [1, 8]", "concurrency: 8", 22, "concurrency must be a pair [low, high]"),
        ("name: demo", "nme: demo", 2, "unknown key nme; did you mean 'name'?"),
        ("model: demo-7b\n", "", 1, "key model is missing: it is the model's name"),
        ("name: demo", "name: [demo", 3, "not valid YAML"),
        ("name: demo", "name: &anchor demo", 2, "anchors (&) and aliases (*) are not allowed"),
        ("name: demo", "name: !!python/name:os.system", 2, "not valid YAML: could not determine a constructor"),
    ],
)
def test_a_fault_is_told_with_its_line(profile_file: Path, old: str, new: str, line: int, words: str) -> None:
    message = complaint(changed(profile_file, old, new))
    assert message.startswith(f"{profile_file}, line {line}: ")
    assert words in message


def test_numbers_may_be_written_as_people_write_them(profile_file: Path) -> None:
    assert Profile.load(changed(profile_file, "value: 2.0e-05", "value: 2e-5")).step_time.per_sequence == 2e-5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "key name is missing"),
        (b"- 1\n", "the file must be a group of keys, got a list"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        (b"a: \x00", "not valid YAML"),
        (b"[" * 100_000, "nested too deep"),
        (b"#" * (MAX_BYTES + 1), "larger than 1 MiB"),
        (b"? [1, 2]\n: 3\n", "a key must be plain text"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "strange.yaml"
    path.write_bytes(content)
    assert words in complaint(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.yaml").endswith("none.yaml: no such file")
    assert "cannot be read" in complaint(tmp_path)


@given(st.text(max_size=60))
def test_any_text_is_a_profile_or_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace", newline="")
    complaint(path)
