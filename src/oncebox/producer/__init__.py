"""The producer: events written inside the caller's own transaction.

`outbox.py` is what a caller sees. `batch.py` checks and encodes; `plan.py` decides what to send; one file for each
driver family (`sqlite.py`, `psycopg.py`, `sqlalchemy.py`) sends it, and is imported when the first such handle comes.
"""

from .batch import Draft
from .outbox import Outbox

__all__ = ["Draft", "Outbox"]
