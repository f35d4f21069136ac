"""`python -m forge_data.preparation.worker DIRECTORY`: tokenizes parts of a job for another process.

Reads numbers of parts from standard input, one a line, and answers each with a line of JSON. It ends with its input, so
it does not outlive who started it by more than one part. It is a plain process, and not one of `multiprocessing`, because
that would import the user's script again, which may be a training run.
"""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from forge_core.errors import DataError
from forge_data.preparation.parts import read_job, tokenize_part
from forge_data.tokenizers.restore import restore


def main() -> None:
    """Works until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    directory = Path(sys.argv[1])
    job = read_job(directory)
    content = directory / "tokenizer.json"
    tokenizer = None if job.wanted.ids else restore(content.read_bytes(), job.tokenizer_eos, str(content), job.add_special_tokens)
    for line in sys.stdin:
        try:
            answer = {"done": asdict(tokenize_part(directory, job, int(line), tokenizer))}
        except DataError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
