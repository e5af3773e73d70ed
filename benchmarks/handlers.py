"""What a developer would write: counts events by key. Any name is a processor of that name, with a state of its own."""

from oncebox import Event
from oncebox.processor import Context, Processor

from .scale import EVENT_TYPE

CHANNEL = "effects"

announcing = Processor("announcing")


@announcing.on(EVENT_TYPE)
def announce(event: Event, ctx: Context) -> None:
    """Notify of the event when its effect is committed: state and notification are one transaction."""
    ctx.connection.execute("select pg_notify(%s, %s)", [CHANNEL, event.payload.decode()])


def count(event: Event, ctx: Context) -> None:
    key = event.ordering_key or ""
    ctx.state.put(key, ctx.state.get(key, 0) + 1)


def __getattr__(name: str) -> Processor:
    if name.startswith("_"):
        raise AttributeError(name)
    app = Processor(name)
    app.on(EVENT_TYPE)(count)
    return app
