"""Architectures: shipped models have as many parameters as published, and configs are read as they come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from simulator.hardware.model_config import FAMILIES, TABLE, ModelError, architecture, find_model, read_model

SHIPPED = yaml.safe_load(TABLE.read_text())["models"]
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_has_the_published_number_of_parameters(name: str) -> None:
    assert find_model(name).parameters.total == SHIPPED[name]["parameters"]


def test_every_family_is_shown_by_a_shipped_model() -> None:
    assert {entry["config"]["model_type"] for entry in SHIPPED.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"),
    ],
)
def test_a_model_is_found_under_the_names_people_write(name: str, same: str) -> None:
    found, known = find_model(name), find_model(same)
    assert (found.parameters, found.kv) == (known.parameters, known.kv)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("Qwen/Qwen2.5-7B", 131072),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 32768),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 32768),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 131072),
        ("Qwen/Qwen3-8B", 40960),
        ("Qwen/Qwen3-8B-Base", 32768),
        ("Qwen/Qwen3-4B-Instruct-2507-FP8", 262144),
    ],
)
def test_relatives_of_one_architecture_take_prompts_of_their_own_length(name: str, tokens: int) -> None:
    assert find_model(name).max_model_len == tokens


def test_a_quantised_checkpoint_is_known_by_its_name() -> None:
    fp8 = find_model("Qwen/Qwen3-4B-Instruct-2507-FP8")
    assert fp8.quantization is not None
    linear, rest = fp8.parameters.linear, fp8.parameters.total - fp8.parameters.linear
    assert fp8.weight_bytes() == linear + 2 * rest  # embeddings and norms stay in 16 bits


def test_four_bits_take_a_scale_and_a_zero_point_for_each_group() -> None:
    awq = find_model("Qwen/Qwen2.5-7B-Instruct-AWQ")
    linear, rest = awq.parameters.linear, awq.parameters.total - awq.parameters.linear
    assert awq.weight_bytes() == pytest.approx(linear * (4 + 20 / 128) / 8 + 2 * rest)


def test_gpt_oss_quantises_its_experts_alone() -> None:
    model = find_model("openai/gpt-oss-20b")
    experts = model.parameters.experts
    assert model.weight_bytes() == pytest.approx(experts * 4.25 / 8 + 2 * (model.parameters.total - experts))
    assert 12e9 < model.weight_bytes() < 14e9  # as published: 12.8 GiB


def test_a_step_reads_the_chosen_experts_and_no_input_table() -> None:
    mixture, dense = find_model("Qwen3-30B-A3B"), find_model("Qwen2.5-7B")
    assert mixture.active_parameters + mixture.parameters.output == pytest.approx(3.0e9, rel=0.03)  # "A3B"
    assert dense.weight_bytes_read() == 2 * (dense.parameters.total - dense.parameters.table)
    tied = find_model("Qwen2.5-0.5B")
    assert tied.weight_bytes_read() == tied.weight_bytes()


def test_ranks_split_weights_until_kv_heads_run_out() -> None:
    model = find_model("Qwen2.5-7B")  # 28 heads, 4 of KV
    norms = model.parameters.other
    assert model.weight_bytes(4) == pytest.approx(2 * ((model.parameters.total - norms) / 4 + norms))
    more = 2 * model.parameters.attention_kv * (1 / 4 - 1 / 7)  # 7 ranks hold one KV head each
    assert model.weight_bytes(7) == pytest.approx(2 * ((model.parameters.total - norms) / 7 + norms) + more)
    with pytest.raises(ModelError, match="28 attention heads; --tensor-parallel-size must divide them, got 3"):
        model.weight_bytes(3)


def test_a_config_is_read_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    for place in (path, tmp_path):
        assert find_model(place).parameters == find_model("Qwen2.5-7B").parameters
    assert [kind.window for kind in read_model(path).kv] == [None]  # use_sliding_window is off


def test_the_text_part_of_a_model_for_images_is_read_with_its_defaults() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }  # fmt: skip
    model, shipped = architecture("gemma", config), find_model("gemma-3-4b")
    assert model.kv == shipped.kv
    assert model.parameters.linear == shipped.parameters.linear
    assert "image" in model.notes[0]


def test_layer_types_tell_which_layers_have_a_window() -> None:
    entry = SHIPPED["openai/gpt-oss-20b"]["config"]
    types = ["sliding_attention", "full_attention", "full_attention"] * 8
    layers = {kind.window: kind.layers for kind in architecture("x", {**entry, "layer_types": types}).kv}
    assert layers == {None: 16, 128: 8}


@pytest.mark.parametrize(
    ("config", "bytes_per_parameter"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "type": "int"}}},
            },
            (4 + 20 / 128) / 8,
        ),
    ],
)
def test_a_checkpoint_says_how_it_is_quantised(config: dict[str, object], bytes_per_parameter: float) -> None:
    quantization = architecture("x", {**QWEN, "quantization_config": config}).quantization
    assert quantization is not None
    assert quantization.bytes_per_parameter == pytest.approx(bytes_per_parameter)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not modelled; known are llama.*num-gpu-blocks-override"),
        ({**QWEN, "num_hidden_layers": None}, "the config's num_hidden_layers must be a whole number, got None"),
        ({**QWEN, "quantization_config": {"quant_method": "hqq"}}, "quantization 'hqq' is not modelled"),
        ({**QWEN, "quantization_config": {"quant_method": "compressed-tensors"}}, "is not understood"),
        ({**QWEN, "use_sliding_window": True}, "needs layer_types"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as refusal:
        architecture("some/model", config)
    assert "some/model" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_name_or_file_that_is_none_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean 'qwen3-8b'\?; or give the path of its config.json"):
        find_model("Qwen/Qwen3-9B")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"not the config.json of a model"):
        find_model(tmp_path)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
}


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "32", [], {}, 10**400, float("nan"), float("inf"), 1e308])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size"]
)
def test_a_number_that_means_nothing_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: value}))
    with pytest.raises(ModelError, match=f"the config's {key} "):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**9}, "may be up to 10,000"),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"quantization_config": 1.5}, "quantization_config must be an object"),
        ({"quantization_config": {"quant_method": "awq", "bits": 0}}, "1 to 16 bits, got 0"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 1e400}}, "is not understood"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}}, "is not understood"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"model_type": "gemma2", "sliding_window": 4096, "layer_types": 5}, "layer_types must be a list"),
        ({"model_type": "gemma2", "sliding_window": 4096, "sliding_window_pattern": 0}, "must be at least 1"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"model_type": None}, "'None' is not modelled"),
    ],
)
def test_a_config_of_another_form_is_refused(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(ModelError, match=told):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"[]", b"null", b"NaN", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}",
     '{"x": "größe"}'.encode("latin-1"),
     json.dumps(LLAMA).encode("utf-16"), json.dumps(LLAMA).encode()[:-5], b'{"hidden_size": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_what_is_no_config_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"not valid JSON|not the config\.json of a model"):
        read_model(tmp_path / "config.json")


def test_ten_gigabytes_are_no_config(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(ModelError, match="larger than 1 MiB"):
        read_model(tmp_path / "config.json")
