"""Model FLOP/s and MFU against figures worked out by hand, and keys against masks written out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.batch import Batch
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.flops import count_flops
from forge_models.shape import CompressedKeys
from forge_parallel import accelerator
from forge_parallel.transforms.float8.transform import Float8
from forge_train.doctor import measure
from forge_train.hooks.metrics import Utilization, keys_met, of_device

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),  # not the figure of SXM
        ("NVIDIA H200", "fp8", 1979e12),  # not the one of bf16
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA B200", "bf16", 2250e12),  # not the one of Hopper
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H200", "fp64", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Some Other GPU", "bf16", None),
    ],
)
def test_peaks_by_device_and_precision(monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None) -> None:
    monkeypatch.setattr(accelerator, "name", lambda _: name)
    assert of_device(GPU, precision) == peak


def test_the_peak_of_a_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = of_device(torch.device("cpu"), "fp32")
    assert first is not None and first > 1e8
    monkeypatch.setattr(measure, "fastest", lambda *_, **__: pytest.fail("measured again"))
    assert of_device(torch.device("cpu"), "fp32") == first
    assert of_device(torch.device("cpu"), "fp64") is None


def run(model: Any, length: int, size: int = 8, compute: str = "bf16", **transforms: Any) -> Any:
    job = SimpleNamespace(
        model=model,
        transforms=transforms,
        precision=SimpleNamespace(compute=compute),
        data=SimpleNamespace(sequence_length=length),
    )
    return SimpleNamespace(job=job, topology=SimpleNamespace(size=size, device=GPU))


def test_llama_3_8b_on_eight_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "name", lambda _: "NVIDIA H100 80GB HBM3")
    model = DecoderConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256)
    found = Utilization.of(run(model, 8192))
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    flops = 6 * matrices + 12 * 32 * 4096 * 8192
    values = found.numbers(8 * 6000.0)
    assert values == pytest.approx({"model_tflops": 6000 * flops / 1e12, "mfu": 6000 * flops / 989e12}, rel=1e-12)
    assert "against 8 x 989 TFLOP/s of NVIDIA H100 80GB HBM3 in bf16, dense" in found.line() and "6 P" in found.line()
    whole = Batch(torch.zeros(2, 8192), torch.zeros(2, 8192))
    attended = found.numbers(8 * 6000.0, [whole])["mfu_attended"]
    keys = sum(range(1, 8193)) / 8192
    assert attended == pytest.approx(6000 * (6 * matrices + 12 * 32 * 4096 * keys) / 989e12, rel=1e-12)


def test_experts_count_with_their_own_width_and_the_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "name", lambda _: "NVIDIA H200")
    moe = MoEConfig(experts=64, top_k=6, shared=2, ffn_dim=1408)
    model = DecoderConfig(dim=2048, layers=2, heads=16, kv_heads=16, ffn_dim=10944, vocab_size=1000, moe=moe)
    found = Utilization.of(run(model, 4096, size=1)).numbers(1e4)["model_tflops"]
    layer = 4 * 2048 * 2048 + 8 * 3 * 2048 * 1408 + 64 * 2048  # attention, 6 + 2 experts, router
    assert found == pytest.approx(1e4 * (6 * (2 * layer + 1000 * 2048) + 12 * 2 * 2048 * 4096) / 1e12, rel=1e-12)


def test_an_unknown_device_and_an_unknown_model_give_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "name", lambda _: "Some Other GPU")
    found = Utilization.of(run(DecoderConfig(), 64))
    assert list(found.numbers(100.0)) == ["model_tflops"] and "peak of Some Other GPU is unknown" in found.line()
    other = Utilization.of(run(object(), 64))
    assert other.numbers(100.0) == {} and "does not declare" in other.line()


def test_float8_is_measured_against_the_peak_of_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "name", lambda _: "NVIDIA H200")
    found = Utilization.of(run(DecoderConfig(), 64, float8=Float8()))
    assert (found.precision, found.peak) == ("fp8", 1979e12)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_keys_are_those_of_a_mask_written_out(window: int | None) -> None:
    rows = [[3, 5, 1, 7], [16]]
    positions = torch.tensor([[place for size in row for place in range(size)] for row in rows], dtype=torch.int32)
    documents = [[number for number, size in enumerate(row) for _ in range(size)] for row in rows]
    seen = sum(
        document[query] == document[key] and key <= query and (window is None or query - key < window)
        for document in documents
        for query in range(16)
        for key in range(16)
    )
    batch = Batch(torch.zeros(2, 16), torch.zeros(2, 16), positions)
    assert keys_met([batch], 16, window) == seen / 32
    assert keys_met([batch, batch], 16, window) == seen / 32
    alone = Batch(torch.zeros(3, 16), torch.zeros(3, 16))
    assert keys_met([alone], 16, window) == sum(min(place, window or 16) for place in range(1, 17)) / 16


@pytest.mark.parametrize(("rate", "limit"), [(2, None), (3, 1), (4, 2)])
def test_compressed_keys_are_those_of_whole_windows_of_documents(rate: int, limit: int | None) -> None:
    rows = [[3, 5, 1, 7], [16]]
    positions = torch.tensor([[place for size in row for place in range(size)] for row in rows], dtype=torch.int32)
    each = [sum(1 for last in range(rate - 1, place + 1, rate)) for row in rows for size in row for place in range(size)]
    batch = Batch(torch.zeros(2, 16), torch.zeros(2, 16), positions)
    assert keys_met([batch], 16, CompressedKeys(rate, limit)) == sum(min(keys, limit or 16) for keys in each) / 32


def test_layers_with_windows_meet_their_own_number_of_keys() -> None:
    counts = count_flops(DecoderConfig(dim=32, layers=3, heads=4, attention=GQA(window=4, global_every=3)).shape)
    met = {4: 2.5, None: 7.0}
    assert counts.training_with(lambda window: met[window]) - 6 * counts.matrix == 12 * 32 * (2 * 2.5 + 7.0)
    latent = MLA(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)
    counts = count_flops(DecoderConfig(dim=32, layers=1, heads=4, attention=latent).shape)
    assert counts.training_with(lambda _: 5.0) - 6 * counts.matrix == 6 * 4 * (6 + 4 + 10) * 5.0
