"""`torch.cuda.Stream` and `Event` of these devices: torch's own, which ask the device. What they order is in `csrc`."""

from typing import Any


def install(device: Any) -> None:
    """Puts the classes, and what `torch.cuda` asks of a build with CUDA, where they are looked for."""
    import torch

    class Stream(torch.Stream):
        """Of the current device where none is told."""

        def __new__(cls, device: Any = None, priority: int = 0, **packed: int) -> "Stream":
            if packed:
                return super().__new__(cls, priority=priority, **packed)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

        @property
        def cuda_stream(self) -> int:
            """In the place of an address."""
            return self.stream_id

        def record_event(self, event: Any = None) -> Any:
            """The event, or a new one, at this place of the stream."""
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event(torch.Event):
        """In the order of CUDA's arguments."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> "Event":
            return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)

        def record(self, stream: Any = None) -> None:
            """In the current stream where none is told."""
            super().record(torch.cuda.current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            """Has a stream wait; the current one where none is told."""
            super().wait(torch.cuda.current_stream() if stream is None else stream)

    vars(torch.cuda).update(Stream=Stream, Event=Event)
    vars(torch.cuda.streams).update(Stream=Stream, Event=Event)
    in_c = {"getCurrentStream": device.current_stream, "getDefaultStream": device.default_stream, "setStream": device.set_stream}
    for name, function in in_c.items():
        setattr(torch._C, f"_cuda_{name}", function)
