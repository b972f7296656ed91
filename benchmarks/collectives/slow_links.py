"""Wires between processes of one machine: TCP with a latency and a bandwidth.

    python -m benchmarks.collectives.slow_links CONFIG

Each address of `{"links": [[from, to], ...]}` passes on what comes to it, after
`seconds`, and not faster than `bytes_per_second`, in both directions: all that
one machine sends shares its wire, as does all that it gets. It ends with its
standard input.
"""

import asyncio
import json
import sys

_PIECE = 1 << 16
# So much of what a wire has still to send waits in memory.
_SECONDS_AHEAD = 0.02


class _Wire:
    """One direction of a machine's network card."""

    def __init__(self, seconds, bytes_per_second):
        self._seconds, self._rate = seconds, bytes_per_second
        self._free = 0.0

    async def carry(self, reader, writer):
        clock = asyncio.get_running_loop().time
        pieces = asyncio.Queue()
        delivery = asyncio.ensure_future(self._deliver(pieces, writer))
        while piece := await reader.read(_PIECE):
            self._free = max(self._free, clock()) + len(piece) / self._rate
            await pieces.put((self._free + self._seconds, piece))
            await asyncio.sleep(self._free - clock() - _SECONDS_AHEAD)
        await pieces.put((0.0, None))
        await delivery

    async def _deliver(self, pieces, writer):
        clock = asyncio.get_running_loop().time
        while True:
            when, piece = await pieces.get()
            if piece is None:
                writer.close()
                return
            await asyncio.sleep(when - clock())
            writer.write(piece)
            await writer.drain()


async def _serve(links, seconds, bytes_per_second):
    for source, target in links:
        wires = [_Wire(seconds, bytes_per_second) for _ in range(2)]

        async def connect(reader, writer, target=target, wires=wires):
            try:
                there = await asyncio.open_connection(*_parts(target))
            except ConnectionRefusedError:  # it has not started yet
                writer.close()
                return
            await asyncio.gather(
                wires[0].carry(reader, there[1]),
                wires[1].carry(there[0], writer),
                return_exceptions=True,
            )

        await asyncio.start_server(connect, *_parts(source))
    print("null", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _parts(address):
    host, port = address.split(":")
    return host, int(port)


if __name__ == "__main__":
    asyncio.run(_serve(**json.loads(sys.argv[1])))
