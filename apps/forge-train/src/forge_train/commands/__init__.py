"""Commands of the trainer, one file each; found through the group `forge.commands`."""
