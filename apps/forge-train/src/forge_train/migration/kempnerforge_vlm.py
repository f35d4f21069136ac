"""The vision-language sections of KempnerForge: [vlm], [vision_encoder] and [adapter]."""

from typing import Any

from forge_train.migration.engine import Migration
from forge_train.migration.kempnerforge_keys import FREEZING, KEYS


def translate_vlm(migration: Migration) -> None:
    """Translates fusion, encoder, adapter and freezing."""
    get, arch = migration.get, migration.get("vlm.arch")
    if arch in ("joint_decoder", "cross_attention", "mot", "moma"):
        migration.write("model.fusion.name", arch, "vlm.arch")
    else:
        migration.cannot("vlm.arch", "choose model.fusion.name: joint_decoder, cross_attention, mot or moma")
        arch = "joint_decoder"
    if arch == "cross_attention":
        every = migration.integer("vlm.cross_attention_every_n_layers")
        migration.write("model.fusion.every", every, "vlm.cross_attention_every_n_layers")
    for key in KEYS:
        section, _, name = key.name.partition(".")
        prefix = next((item for item in ("cross_attention", "mot", "moma") if name.startswith(f"{item}_")), arch)
        if section == "vlm" and prefix != arch:
            migration.unused(key.name, because=f'vlm.arch is "{arch}"')
    kind = get("vision_encoder.type")
    if kind in ("siglip2", "clip"):
        migration.write("model.encoder.name", kind, "vision_encoder.type")
        if get("vision_encoder.path"):
            migration.write(
                "model.encoder.path",
                get("vision_encoder.path"),
                "vision_encoder.path",
                note="a folder on this machine: Forge downloads nothing",
            )
        else:
            migration.fill_in("model.encoder.path", "encoder", "the folder of the encoder", active=True)
        if kind == "clip":
            migration.remark("model.encoder.name", "the last layer without its class token, as in KempnerForge")
    else:
        migration.cannot(
            "vision_encoder.type", "Forge has no random features; a vision transformer with random weights is written"
        )
        migration.write("model.encoder.name", "vit")
        migration.write("model.encoder.size", migration.integer("data.hf_image_size"), "data.hf_image_size")
        migration.drop("vision_encoder.path", "a vision transformer has no folder")
    _adapter(migration)
    _stages(migration, arch)


def _adapter(migration: Migration) -> None:
    kinds = {"mlp_2layer": "mlp", "linear": "linear", "avgpool": "average_pool", "attentional_pool": "attention_pool"}
    kind = migration.get("adapter.type")
    if kind not in kinds:
        migration.cannot("adapter.type", f"choose model.adapter.name: {', '.join(kinds.values())}")
        kind = "mlp_2layer"
    migration.write("model.adapter.name", kinds[kind], "adapter.type")
    hidden = migration.integer("adapter.hidden_dim")
    if hidden and kind == "mlp_2layer":
        migration.write("model.adapter.hidden_dim", hidden, "adapter.hidden_dim")
    if kind in ("avgpool", "attentional_pool"):
        migration.write("model.adapter.window", migration.integer("adapter.pool_window"), "adapter.pool_window")
    if kind == "attentional_pool":
        migration.write("model.adapter.heads", migration.integer("adapter.pool_heads"), "adapter.pool_heads")
    if migration.get("adapter.activation") != "gelu" and kind == "mlp_2layer":
        migration.cannot("adapter.activation", "adapters of Forge have gelu, which is written")


_ROLES = {
    "transformer": "decoder",
    "vision_encoder": "encoder",
    "adapter": "adapter",
    "cross_attention": "fusion",
    "mot": "fusion",
    "moma": "fusion",
}


def _stages(migration: Migration, arch: str) -> None:
    roles = ["decoder", "encoder", "adapter", *(["fusion"] if arch != "joint_decoder" else [])]
    frozen: set[str] = set()
    entries: list[tuple[int, Any, str]] = [(0, migration.tables("vlm.freeze"), "vlm.freeze")]
    key = "vlm.freeze_schedule"
    entries += [
        (migration.entry(key, entry, "start_step", int, 0), migration.entry(key, entry, "specs", list, []), key)
        for entry in migration.tables(key)
    ]
    stages: list[tuple[int, list[str], str]] = []
    for start, specs, key in entries:
        for spec in specs:
            if not isinstance(spec, dict):
                raise migration.wrong(key, spec, "tables with module and frozen")
            role = _ROLES.get(migration.entry(key, spec, "module", str, ""))  # pyright: ignore[reportUnknownArgumentType]
            if role is None:
                migration.cannot(
                    key, f"{spec.get('module')!r} is not a module of KempnerForge's model; name the parts in [[train.stages]]"
                )
            elif spec.get("frozen", True):
                frozen.add(role)
            else:
                frozen.discard(role)
        stages.append((start, [role for role in roles if role not in frozen], key))
    if len(stages) == 1 and not frozen:
        migration.write_nothing("vlm.freeze", "nothing is frozen")
        return
    for index, (_, trained, key) in enumerate(stages):
        migration.write(f"train.stages.{index}.train", trained, key, note=FREEZING)
        if index + 1 < len(stages):
            migration.write(f"train.stages.{index}.until", stages[index + 1][0], stages[index + 1][2])
