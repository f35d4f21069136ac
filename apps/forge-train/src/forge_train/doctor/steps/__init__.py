"""The steps of the doctor: each a function that measures and judges, run in a separate process."""
