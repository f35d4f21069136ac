"""What TensorBoard and W&B left on disk, read by TensorBoard's own reader and by the record format of W&B's file."""

import json
import struct
import time
from pathlib import Path
from typing import Any


def tensorboard_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) as TensorBoard would draw them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def wandb_records(file: Path, patience: float = 20.0) -> list[Any]:
    """Records of a `run-ID.wandb` file once its last one, `exit`, is there: a process of W&B's own writes it, and `finish`
    does not always wait for the disk."""
    deadline = time.monotonic() + patience
    while not (records := _records(file.read_bytes())) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.05)
    return records


def _records(content: bytes) -> list[Any]:
    """Protocol buffers of a LevelDB log: 32 KiB blocks of (checksum, length, type, data); the first has a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    block = 32768
    records, whole, position = [], b"", 7
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += 7
        if position + length > len(content):
            break
        whole += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


def wandb_rows(records: list[Any]) -> list[dict[str, Any]]:
    """History rows, without W&B's own columns."""
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows
