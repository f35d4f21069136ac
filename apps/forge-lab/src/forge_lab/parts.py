"""Parts that this distribution registers, by group and name. The registry imports a part on its first use."""

PARTS = {
    "forge.commands": {
        "sweep": "forge_lab.commands:sweep",
        "fit": "forge_lab.commands:fit",
        "compare": "forge_lab.commands:compare",
        "bench": "forge_lab.campaigns.command:bench",
    },
}
