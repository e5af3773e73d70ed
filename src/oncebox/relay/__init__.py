"""The relay's engine: claim → heartbeat → publish → judge → finalize, for one worker, wherever it is hosted."""
