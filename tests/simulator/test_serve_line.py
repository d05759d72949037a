"""Pasted lines: whatever way a server's start is written, the same flags come out of it."""

from __future__ import annotations

import random
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.engine_flags import EngineFlags, FlagError
from simulator.flags.serve_flags import ServeFlag, find_flag, serve_flags
from simulator.flags.serve_line import ServeLine, ServeLineError, read_line, read_lines
from simulator.flags.vllm_flags import parse_flags

WANTED = {"max_num_seqs": "64", "tensor_parallel_size": "2", "enable_chunked_prefill": False}


def complaint(text: str) -> str:
    with pytest.raises(FlagError) as caught:
        read_line(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- the table of flags


def test_every_flag_of_the_simulator_is_in_the_table_as_modelled() -> None:
    known = {flag.name.replace("-", "_") for flag in serve_flags().values() if flag.kind == "modelled"}
    fields = set(EngineFlags.__dataclass_fields__) - {"engine_version", "num_gpu_blocks"}
    assert fields | {"num_gpu_blocks_override", "kv_cache_memory_bytes"} <= known


def test_the_exceptions_of_the_table_name_flags_that_are_not_modelled() -> None:
    excused = [flag for flag in serve_flags().values() if flag.as_if_left_out or flag.opposite_matters]
    assert len({flag.name for flag in excused}) > 40
    assert {flag.kind for flag in excused} == {"not_modelled"}


def test_no_flag_is_in_two_places() -> None:
    kinds: dict[str, set[tuple[str, str]]] = {}
    for flag in serve_flags().values():
        kinds.setdefault(flag.name, set()).add((flag.kind, flag.topic))
    assert [name for name, places in kinds.items() if len(places) > 1] == []


@pytest.mark.parametrize(
    ("written", "name", "positive"),
    [
        ("-tp", "tensor-parallel-size", True),
        ("--max_num_seqs", "max-num-seqs", True),
        ("--no-enable-prefix-caching", "enable-prefix-caching", False),
        ("--kv-cache-memory", "kv-cache-memory-bytes", True),
        ("--device-memory-utilization", "gpu-memory-utilization", True),
        ("--speculative-config.method", "speculative-config", True),
        ("--compilation_config.cudagraph_mode", "compilation-config", True),
        ("-O3", "optimization-level", True),
    ],
)
def test_flags_are_found_as_vllm_finds_them(written: str, name: str, positive: bool) -> None:
    flag, is_positive = find_flag(written)
    assert (flag.name, is_positive) == (name, positive)


@pytest.mark.parametrize(
    ("flag", "value", "refused"),
    [
        ("--enable-lora", True, True),
        ("--enable-lora", False, False),
        ("--disable-cascade-attn", False, True),
        ("--pipeline-parallel-size", "1", False),
        ("--pipeline-parallel-size", "2", True),
        ("--dtype", "bfloat16", False),
        ("--dtype", "float32", True),
        ("--port", "8000", False),
    ],
)
def test_what_changes_nothing_is_not_refused(flag: str, value: str | bool, refused: bool) -> None:
    assert find_flag(flag)[0].refuses(value) is refused


# --- one line


@pytest.mark.parametrize(
    "text",
    [
        "--max-num-seqs 64 -tp 2 --no-enable-chunked-prefill",
        "--no-enable-chunked-prefill --tensor_parallel_size=2 --max_num_seqs=64",
        "--max-num-seqs 8 --max-num-seqs 64 -tp=2 --enable-chunked-prefill --no-enable-chunked-prefill",
        "$ vllm serve Qwen/Qwen2.5-7B --max-num-seqs 64 -tp 2 --no-enable-chunked-prefill",
        "# vllm serve Qwen/Qwen2.5-7B \\\n  --max-num-seqs 64 \\\n  -tp 2 \\\n  --no-enable-chunked-prefill",
        "$ vllm serve Qwen/Qwen2.5-7B \\\n> --max-num-seqs 64 \\\n> -tp 2 --no-enable-chunked-prefill",
        "A=/x CUDA_DEVICES='0,1' /opt/bin/vllm serve --max-num-seqs 64 --no-enable-chunked-prefill Q/m -tp 2",
        "nohup vllm serve Q/m --max-num-seqs 64 -tp 2 --no-enable-chunked-prefill > server.log 2>&1 &",
        "env A=b vllm serve Q/m --max-num-seqs '64' -tp \"2\" --no-enable-chunked-prefill",
        "python -m vllm.entrypoints.openai.api_server --model Q/m --max-num-seqs 64 -tp 2 --no-enable-chunked-prefill",
        "python3 -m vllm.entrypoints.openai.api_server -tp 2 --no_enable_chunked_prefill --max-num-seqs 64 | tee log",
        "docker run --runtime nvidia --gpus all -v ~/.cache:/root/.cache --env A=b -p 8000:8000 --ipc=host --rm -it "
        "--name vllm vllm/vllm-openai:latest --model Q/m --max-num-seqs 64 -tp 2 --no-enable-chunked-prefill",
        "sudo docker run -d quay.io/x/image vllm serve Q/m --max-num-seqs 64 -tp 2 --no-enable-chunked-prefill",
        "numactl --cpunodebind=0 vllm serve Q/m --max-num-seqs 64 -tp 2 --no-enable-chunked-prefill",
    ],
)
def test_every_way_of_writing_gives_the_same_flags(text: str) -> None:
    given = read_line(text).given
    assert {name: value for name, value in given.items() if name != "model"} == WANTED


def test_the_order_of_flags_does_not_matter() -> None:
    words = [
        "--max-num-seqs 64",
        "--block-size 32",
        "--enforce-eager",
        "--gpu L4",
        "-tp 2",
        "--api-key a b",
        "--port=1",
    ]
    shuffled = random.Random(0)
    first = read_line(" ".join(words))
    for _ in range(20):
        shuffled.shuffle(words)
        line = read_line(" ".join(words))
        assert (line.given, line.words) == (first.given, first.words)


def test_json_values_lists_and_negative_numbers_stay_whole() -> None:
    config = '{"method": "eagle", "num_speculative_tokens": 3}'
    line = read_line(
        f"vllm serve m --speculative-config '{config}' --api-key one two --max-model-len -1 --hf-token --port 1"
    )
    assert line.given["speculative_config"] == config
    assert line.given["api_key"] == "one two"
    assert line.given["max_model_len"] == "-1"
    assert (line.given["hf_token"], line.given["port"]) == ("", "1")


def test_a_line_tells_model_environment_and_what_stands_before_it() -> None:
    line = read_line("VLLM_USE_V1=1 numactl --cpunodebind=0 vllm serve --enable-prefix-caching Q/m")
    assert (line.model, line.environment) == ("Q/m", {"VLLM_USE_V1": "1"})
    assert line.before == "numactl --cpunodebind=0"
    assert read_line("docker run -e HF_TOKEN=x -e VLLM_PORT=1 img --model=Q/m").environment == {
        "HF_TOKEN": "x",
        "VLLM_PORT": "1",
    }


def test_capsims_own_words_are_a_name_and_another_gpu() -> None:
    line = read_line("name='twice as many' --max-num-seqs 128 --gpu A100-SXM4-80GB")
    assert (line.name, line.words, line.label) == ("twice as many", {"gpu": "A100-SXM4-80GB"}, "twice as many")
    assert read_line("--replicas 2 --router=least-kv").words == {"replicas": "2", "router": "least-kv"}
    assert read_line("--gpu=L4 --no-async-scheduling").label == "--gpu L4 --no-async-scheduling"


def test_a_label_has_no_secrets() -> None:
    assert read_line("vllm serve m --api-key s3cret --hf-token hf_x --max-num-seqs 4").label == "--max-num-seqs 4"


def test_flags_that_are_known_apart_make_a_line() -> None:
    line = ServeLine.of({"--max-num-seqs": "4", "--enforce-eager": True}, gpu="L4")
    assert line.given == {"max_num_seqs": "4", "enforce_eager": True}


def test_what_is_read_is_what_the_engines_flags_take() -> None:
    read = read_line("--max-num-batched-tokens 8k --watermark 0.02 --no-async-scheduling --scheduling-policy priority")
    assert parse_flags(read.given) == {
        "max_num_batched_tokens": 8000,
        "watermark": 0.02,
        "async_scheduling": False,
        "scheduling_policy": "priority",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--max-num-se 4", "abbreviation, which is not read; write --max-num-seqs"),
        ("--gpu-memory-util 0.9", "abbreviation"),
        ("--max-nun-seqs 4", "vLLM has no flag --max-nun-seqs; did you mean '--max-num-seqs'?"),
        ("--zzz", "vLLM has no flag --zzz; see vllm serve --help=all"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("--max-num-seqs --enforce-eager", "--max-num-seqs needs a value"),
        ("--enforce-eager=true", "a switch and takes no value"),
        ("--max-num-seqs 4 5", "'5' belongs to no flag"),
        ("vllm serve Q/m Q/n", "'Q/n' belongs to no flag"),
        ("vllm bench serve", "'vllm' begins neither flags nor a line such as"),
        ("docker run --rm -it", "names no image"),
        ("", "names no flag"),
        ("name=x", "names no flag"),
        ("--port '8000", "an open quote"),
    ],
)
def test_faults_are_told_in_one_line(text: str, told: str) -> None:
    assert told in complaint(text)


# --- a file of lines


def test_a_file_has_one_alternative_a_line() -> None:
    text = """
    # comments and empty lines

    name=more --max-num-seqs 512
    # vllm serve Q/m \\
    #   is a comment only above
    $ vllm serve Q/m \\
        --max-num-seqs 64
    --block-size 32"""
    with pytest.raises(ServeLineError, match="line 6: "):
        read_lines(text)
    lines = read_lines(
        "\n".join(line for line in text.splitlines() if "only above" not in line and "# vllm" not in line)
    )
    assert [line.given for line in lines] == [{"max_num_seqs": "512"}, {"max_num_seqs": "64"}, {"block_size": "32"}]
    assert lines[0].name == "more"


def test_a_fault_in_a_file_names_its_line() -> None:
    with pytest.raises(ServeLineError, match=r"line 3: vLLM has no flag --foo"):
        read_lines("--block-size 32\n\n--foo 1\n")


def written(flag: ServeFlag) -> st.SearchStrategy[str]:
    """The flag as someone might write it, with values that fit or do not."""
    names = [name for name, known in serve_flags().items() if known.name == flag.name]
    value = st.one_of(
        st.integers().map(str), st.text(max_size=20).map(shlex.quote), st.sampled_from(["8k", "1e400", "nan", "{}"])
    )
    joint = st.tuples(st.sampled_from(names), st.sampled_from([" ", "="]), value).map("".join)
    return st.one_of(joint, st.sampled_from([f"--no-{flag.name}", *names]))


FLAGS = sorted({flag.name: flag for flag in serve_flags().values()}.values(), key=lambda flag: flag.name)


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(FLAGS).flatmap(written), min_size=1, max_size=6),
    st.sampled_from(["", "vllm serve M ", "a b "]),
)
def test_any_line_of_flags_is_read_or_refused_in_a_line(parts: list[str], start: str) -> None:
    try:
        told = " ".join(read_line(start + " ".join(parts)).label.split())
    except FlagError as refusal:
        told = str(refusal)
    assert told
    assert "\n" not in told


@pytest.mark.parametrize(
    "text", ["\0", "'", "\\", "$(" * 10_000, "--" * 10_000, "-" * 100_000, "\ufeff--x 1", "'" * 9_999, "|" * 5_000]
)
def test_garbage_is_no_line(text: str) -> None:
    with pytest.raises(FlagError):
        read_line(text)
