"""Where tokens come from: each module reads one format behind `forge_core.protocols.data.Source`."""
