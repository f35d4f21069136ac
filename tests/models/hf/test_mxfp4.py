"""Folders of gpt-oss in MXFP4: tensors bit by bit as transformers dequantizes them, whole and in boxes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.errors import ConfigError
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_models.hf.mxfp4 import unpacked
from forge_models.hf.reader import Folder
from models.hf.published import folder_of, reference, spread
from models.hf.zoo import GPT_OSS, SIZES, tokens

VALUES: dict[str, Any] = (
    SIZES | GPT_OSS | {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
)
TABLE = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}}
FILE = "model.safetensors"


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in bf16, with experts as transformers dequantizes them, and in MXFP4."""
    root, generator = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(0)
    plain = folder_of(spread(reference(VALUES)).bfloat16(), VALUES, root / "plain")
    tensors, packed = load_file(plain / FILE), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 127, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors | packed, root / "packed.safetensors")
    made = {
        name.removesuffix("_blocks"): dequantized(packed[name], packed[name.replace("_blocks", "_scales")])
        for name in packed
        if name.endswith("_blocks")
    }
    save_file(tensors | {name: value.contiguous() for name, value in made.items()}, plain / FILE)
    (root / "packed").mkdir()
    (root / "packed.safetensors").rename(root / "packed" / FILE)
    (root / "packed" / "config.json").write_text(json.dumps(VALUES | TABLE))
    return plain, root / "packed"


def test_every_byte_with_every_scale_is_that_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    found, expected = unpacked(blocks, scales).transpose(-1, -2), dequantized(blocks, scales)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
    assert bool(unpacked(blocks[:, :1], torch.full((1, 1, 16), 255, dtype=torch.uint8)).isnan().all())


def test_a_packed_folder_has_the_tensors_and_logits_of_the_plain_one(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain, packed = (Folder(folder) for folder in folders)
    assert packed.tensors == plain.tensors
    before, after = plain.read(list(plain.tensors)), packed.read(list(packed.tensors))
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)
    HfConverter().build().write(tmp_path / "ours", packed)
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    theirs = HfConverter().build()
    expected, found = (theirs.reference(folder, tokens()) for folder in (folders[0], tmp_path / "ours"))
    assert isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)
    assert torch.equal(expected, found) and bool(expected.isfinite().all())


def test_boxes_equal_the_whole(folders: tuple[Path, Path]) -> None:
    """A rank reads its own part, which need not begin or end with a block."""
    packed = Folder(folders[1])
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"blocks.1.mlp.experts.{part}"
        whole = packed.read([name])[name]
        for offset, extent in (
            ((1, 2, 3), (3, 9, 11)),
            ((0, 0, 0), tuple(whole.shape)),
            ((2, 5, 31), (1, 7, 2)),
            ((0, 1, 32), (5, 3, 32)),
        ):
            box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
            assert torch.equal(packed.box(name, offset, extent), whole[box]), (part, offset)
        assert packed.box(name, (1, 2, 40), (3, 4, 0)).shape == (3, 4, 0)
        assert packed.box(name, (1, 2, 40), (0, 4, 5)).shape == (0, 4, 5)


def changed(folder: Path, target: Path, change: Any, table: Any = TABLE) -> Path:
    target.mkdir()
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, target / FILE)
    (target / "config.json").write_text(json.dumps(VALUES | table))
    return target


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}_scales"), f"{NAME}: missing"),
        (lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"][:, :, :1].contiguous()}), "blocks have shape"),
        (lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"][..., :8].contiguous()}), "blocks need 16 bytes"),
        (lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"].int()}), "are uint8, but these are U8 and I32"),
        (lambda t: [t.update({name: t[name][:, 1:].contiguous()}) for name in (f"{NAME}_blocks", f"{NAME}_scales")], "shape"),
    ],
)
def test_damaged_tensors_are_refused(folders: tuple[Path, Path], tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Folder(changed(folders[1], tmp_path / "model", change))


def test_configuration_and_tensors_must_agree(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="says MXFP4, but no tensor is in it; remove the key"):
        Folder(changed(folders[0], tmp_path / "plain", lambda _: None))
    with pytest.raises(Unsupported, match=r"down_proj_blocks: unexpected"):
        Folder(changed(folders[1], tmp_path / "packed", lambda _: None, {}))
    with pytest.raises(ConfigError, match=r"quantization_config\.group_size: is not implemented"):
        other = {"quantization_config": TABLE["quantization_config"] | {"group_size": 16}}
        Folder(changed(folders[1], tmp_path / "other", lambda _: None, other))
