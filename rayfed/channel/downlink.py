"""Compression of what the server sends: clients hold a replica of it, which encoded differences move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rayfed.algorithm import Context, State
from rayfed.channel.compression import Compression
from rayfed.channel.updates import flat_update, moved, received
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import as_real, bytes_by_field, is_counter, named_tensors, nbytes, without


@dataclass(frozen=True)
class Downlink:
    """The server's side of `compression.down`.

    Its memory has the `replica` that clients download, which is what the server sends up to the error that is still to
    be sent, and when each client has `heard` the server last; 0: never.
    """

    compression: Compression

    def next_memory(self, before: State, now: State, memory: State, ctx: Context) -> State:
        """Return the memory after a round.

        Args:
            before: What the clients of the round have received.
            now: What the server would send next without compression.
        """
        base = received(now, before, ctx.task.untrained)
        update, sizes = flat_update(now, base)
        if not sizes:
            return memory
        replica = moved(now, base, update, self.compression.decoded(update, sizes))
        heard = memory.get("heard", torch.zeros(ctx.task.num_clients, dtype=torch.int32)).clone()
        heard[list(ctx.cohort)] = ctx.round
        return memory | {"replica": replica, "heard": heard}

    def received_bytes(
        self, down: State, memory: State, round: int, clients: Sequence[ClientIndex]
    ) -> Mapping[str, int]:
        """Return the bytes that `clients` download: the differences since they heard last, or everything if less."""
        replica: State = memory.get("replica", {})
        sent = {}
        for name, size in bytes_by_field(without(down, replica)).items():
            sent[name] = size * len(clients)
        if not replica:
            return sent
        whole = nbytes(replica)
        encoded = self._encoded_bytes(replica)
        heard = []
        for client in clients:
            heard.append(int(memory["heard"][client]))
        each = []
        for last in heard:
            if last:
                each.append(min(whole, (round - last) * encoded))
            else:
                each.append(whole)
        return {"+".join(replica): sum(each)} | sent

    def _encoded_bytes(self, replica: State) -> int:
        """Return the length of an encoded difference, in which integers are sent as they are."""
        tensors = []
        for _, tensor in named_tensors(replica):
            tensors.append(tensor)
        counters = [tensor.nbytes for tensor in tensors if is_counter(tensor)]
        sizes = [as_real(tensor).numel() for tensor in tensors if not is_counter(tensor)]
        return self.compression.nbytes(sizes) + sum(counters)
