"""The example of a web service on PostgreSQL, with real requests, a processor and a relay."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from oncebox.publishers.file import read
from oncebox.testing.servers import free_port
from tests.spark.steps import until

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "web_shop"
CUSTOMERS = [f"customer-{number}" for number in range(5)]
ORDERS = 60


@contextmanager
def web(url: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "service:api", "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "SHOP_DATABASE": url}
    with (
        subprocess.Popen(command, cwd=EXAMPLE, env=environment, text=True) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            until(lambda: answers(client), server)
            yield client
        finally:
            server.send_signal(signal.SIGKILL)  # whatever it was doing


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/customers/nobody").status_code == 404
    except httpx.TransportError:
        return False


def oncebox(url: str, *words: str) -> None:
    command = [sys.executable, "-m", "oncebox", *words]
    subprocess.run(
        command, cwd=EXAMPLE, env={**os.environ, "ONCEBOX_STORE": url}, check=True, stdout=subprocess.DEVNULL
    )


def ordered(client: httpx.Client, number: int) -> int:
    order = {"customer": CUSTOMERS[number % len(CUSTOMERS)], "amount": 100 if number % 10 else 9_999}
    return client.post("/orders", json=order).status_code


@pytest.mark.timeout(900)
def test_every_order_counts_once_from_the_request_to_the_promotion(postgresql_url: str, tmp_path: Path) -> None:
    oncebox(postgresql_url, "init")
    with web(postgresql_url) as client, ThreadPoolExecutor(4) as clients:
        codes = Counter(clients.map(lambda number: ordered(client, number), range(ORDERS)))
        assert codes == {201: ORDERS - ORDERS // 10, 402: ORDERS // 10}
        assert client.post("/orders", json={"customer": "x", "amount": 0}).status_code == 422
        words = ["process", "handlers:app", "--state", postgresql_url, "--emit", postgresql_url, "--drain"]
        oncebox(postgresql_url, *words, "--from", f"outbox+{postgresql_url}{joint(postgresql_url)}mode=read")
        truth = rows(postgresql_url, "select customer, count(*)::int, sum(amount)::int from orders group by 1")
        seen = {name: client.get(f"/customers/{name}").json() for name in CUSTOMERS}
    assert seen == {name: {"orders": orders, "spent": spent} for name, orders, spent in truth}
    oncebox(postgresql_url, "relay", "--to", f"file://{tmp_path}/events", "--drain")
    sent = [json.loads(one.payload) for one in read(tmp_path / "events") if one.destination == "customer.promoted"]
    assert sorted(one["customer"] for one in sent) == sorted(name for name, _, spent in truth if spent >= 1_000)


def joint(url: str) -> str:
    return "&" if urlsplit(url).query else "?"


def rows(url: str, query: str) -> list[tuple[str, int, int]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()
