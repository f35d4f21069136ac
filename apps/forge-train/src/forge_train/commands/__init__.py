"""Commands of `forge-train`, registered in the plugin group `forge.commands`."""
