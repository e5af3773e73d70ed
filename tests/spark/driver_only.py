"""A processor that only its driver can import, as where a package is missing on the executors."""

from pathlib import Path

from oncebox.processor import Processor

if b"pyspark" in Path("/proc/self/cmdline").read_bytes():
    raise ImportError("this package is on the driver's machine alone")

app = Processor("driver-only")
app.on("order.created")(lambda _event, _ctx: None)
