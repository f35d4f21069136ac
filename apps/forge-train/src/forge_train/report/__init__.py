"""The page that a run leaves behind. `forge_train.report.write.write_report` writes it."""
