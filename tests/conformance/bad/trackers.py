"""Trackers that write too early, choke on numbers, or cannot go on."""

import json

from conformance.part import Part


class Lines:
    """Right: one line of text a write."""

    def __init__(self, run):
        self.path = run.directory / "lines"

    def rewind(self, step):
        self.path.touch()

    def write(self, step, values):
        with self.path.open("a") as file:
            file.write(f"{step} {values}\n")

    def close(self):
        pass


class Early(Lines):
    def __init__(self, run):
        super().__init__(run)
        self.path.touch()


class Late(Lines):
    """A run that ends before it began leaves a file."""

    def close(self):
        self.path.touch()


class Strict(Lines):
    """JSON has no infinities."""

    def write(self, step, values):
        try:
            json.dumps(values, allow_nan=False)
        except ValueError as error:
            raise AssertionError(f"cannot write {values}") from error


class Adds(Lines):
    def write(self, step, values):
        values["step"] = step


class New(Lines):
    """Takes the directory for itself."""

    def rewind(self, step):
        assert not self.path.exists(), "the file is there already"
        self.path.touch()


class Reaches(Lines):
    def __init__(self, run):
        super().__init__(run)
        self.tokens = getattr(run, "tokens_per_step", 0)


BAD = {
    "check_before_rewind": [(Part(make=Early), "writes lines before rewind"), (Part(make=Late), "writes lines at close")],
    "check_numbers": [(Part(make=Strict), "cannot write"), (Part(make=Adds), "changes the values")],
    "check_resume": [(Part(make=New), "there already")],
    "check_protocol": [(Part(make=Reaches), "uses tokens_per_step of the run")],
}
