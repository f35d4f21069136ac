"""A server that speaks S3, in a thread: moto's, on a free port of this machine."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKET = "bucket"


@dataclass
class Server:
    """`before` is called with the method and the path of each request, in a thread of the server; a number that it gives is the
    status of the answer, and the request is not carried out."""

    address: str
    before: Callable[[str, str], int | None] = lambda method, path: None


@contextmanager
def s3_server() -> Iterator[Server]:
    """It has one empty bucket; the environment sends s3fs and botocore there, those of child processes, too."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it says each request
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    server = Server(f"http://{host}:{port}")
    inner: Any = moto._server
    carry_out = inner.app

    def asked(environ: dict[str, Any], answer: Callable[..., Any]) -> Any:
        status = server.before(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if status is None:
            return carry_out(environ, answer)
        answer(f"{status} not carried out", [("Content-Length", "0")])
        return []

    inner.app = asked
    said = {
        "AWS_ENDPOINT_URL": server.address,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "not a secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    S3FileSystem.clear_instance_cache()  # one of them may know the address of an earlier server
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        S3FileSystem.clear_instance_cache()
        moto.stop()
