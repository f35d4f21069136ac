"""The page that a run leaves behind, and pages over several runs. `forge_train.report.write` writes them."""
