"""What this distribution registers, by group and name. The registry reads the table and imports a part when it is used."""

PARTS = {
    "forge.commands": {
        "sweep": "forge_lab.commands:sweep",
        "fit": "forge_lab.commands:fit",
        "compare": "forge_lab.commands:compare",
    },
}
