"""Parts that this distribution registers, by group and name. The registry imports a part on its first use."""

PARTS = {
    "forge.hooks": {
        "inside": "forge_interp.commands.inside:Inside",
    },
    "forge.checks": {
        "inside_can_be_measured": "forge_interp.commands.inside:inside_can_be_measured",
    },
    "forge.commands": {
        "probe": "forge_interp.commands.probe:probe",
        "similarity": "forge_interp.commands.similarity:similarity",
        "neuro": "forge_interp.commands.neuro:neuro",
        "lens": "forge_interp.commands.lens:lens",
        "sae": "forge_interp.commands.lens:sae",
    },
}
