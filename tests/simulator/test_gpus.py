"""The table of GPUs: what issue 5 asks for is there, sourced, in order, and found under the names people write."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.hardware.gpus import GpuError, find_gpu, read_gpus

ASKED = (
    "RTX 3090", "RTX 4090", "RTX 5090", "L4", "L40S", "A10", "A100 40GB PCIe", "A100 40GB SXM", "A100 80GB PCIe",
    "A100 80GB SXM", "H100 PCIe", "H100 SXM", "H200", "B200", "RTX 6000 Ada", "RTX PRO 6000", "RTX PRO 4500", "MI300X",
)  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_card_is_in_the_table_and_found_by_each_of_its_names(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.name == name
    assert all(find_gpu(other) is gpu for other in gpu.names)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("nvidia geforce rtx 4090", "RTX 4090"),
        ("A100-SXM4-80GB", "A100 80GB SXM"),
        ("A100 80 GB SXM", "A100 80GB SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100-pcie", "H100 PCIe"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_name_is_understood_as_nvidia_smi_and_people_write_it(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize("name", ASKED)
def test_numbers_are_of_the_order_of_a_gpu(name: str) -> None:
    gpu = find_gpu(name)
    assert 20 < gpu.memory_gib < 300
    assert 50 < gpu.dense_bf16 / gpu.memory_bandwidth < 500  # operations a byte: from H200 and A100 to L4 and L40S
    assert gpu.dense_fp8 is None or gpu.dense_fp8 / gpu.dense_bf16 == pytest.approx(2, rel=0.02)
    assert gpu.dense_operations("fp8") == (gpu.dense_fp8 or gpu.dense_bf16)
    assert gpu.source
    assert gpu.price_per_hour is None  # prices are the user's


def test_a_name_that_fits_several_or_none_is_refused() -> None:
    with pytest.raises(GpuError, match="may be RTX 6000 Ada or RTX PRO 6000; name one of them"):
        find_gpu("6000")
    with pytest.raises(GpuError, match=r"no GPU is called 'L40'; did you mean 'L40S'\?"):
        find_gpu("L40")
    with pytest.raises(GpuError, match="no GPU is called ''"):
        find_gpu("")


def test_a_table_of_ones_own_may_have_prices(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(
        "gpus:\n- name: Mine\n  memory_gib: 24.0\n  memory_bandwidth: 1.0e+12\n  dense_bf16: 1.0e+14\n"
        "  link_bandwidth: 6.4e+10\n  source: measured here\n  price_per_hour: 0.4\n"
    )
    assert find_gpu("mine", path).price_per_hour == 0.4
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("gpus:\n- name: Mine\n  memory: 24\n")
    with pytest.raises(GpuError, match="line 3: unknown key"):
        read_gpus(wrong)
