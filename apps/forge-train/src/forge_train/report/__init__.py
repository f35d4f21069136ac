"""The page that a run leaves behind, and pages over several runs. `forge_train.report.page` writes them."""
