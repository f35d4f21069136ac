"""What this distribution registers, by group and name. The registry reads the table and imports a part when it is used."""

PARTS = {
    "forge.stores": {
        "local": "forge_ckpt.components:Local",
        "remote": "forge_ckpt.components:Remote",
    },
    "forge.commands": {
        "ckpt": "forge_ckpt.commands:app",
    },
}
