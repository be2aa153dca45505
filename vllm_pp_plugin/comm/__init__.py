"""Asynchronous pipeline sends: channel (the wire), ledger (who owns a buffer), watcher (the clock)."""
