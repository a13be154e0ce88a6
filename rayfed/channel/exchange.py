"""The channel between clients and server: one `Delegate` around each exchange of a method's rounds.

    a client:  trains (on false data, if it attacks) → [local: clips, adds noise] → compresses → [attacks alone] → clips
    the server:  [attackers see what the honest send] → clips → robust rule or mean → noise → the method's `aggregate`

Each step has its place for a reason. Local noise comes first, so that everything after it is computed from what is
private already, and the compressed length is true. Compression precedes attacks, because attackers see what honest
clients send, and need not compress. Clipping follows, because the server clips whatever it receives. A rule takes the
place of the mean, and noise covers what the rule returns. Where no step needs all updates of a cohort at once, clients
do everything before the mean, which hosts then sum up as ever.

What the channel keeps between rounds is the field `channel` of the states of clients and of the server. The method
never sees it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Delegate, Replies, Reply, State
from rayfed.channel.channel import Channel
from rayfed.channel.client_side import attacked, clipped_centrally, compressed, made_private, within_bound
from rayfed.channel.downlink import Downlink
from rayfed.channel.server_side import Cohort, clipped_here, protected, with_crafted, with_variances
from rayfed.channel.updates import Updates, changes, received, values_of
from rayfed.core.ids import ClientIndex
from rayfed.core.task import Batch
from rayfed.core.trees import as_real, bytes_by_field, is_counter, named_tensors, only, without

CHANNEL = "channel"
"""The field of states and payloads that belongs to the channel."""


@dataclass(frozen=True)
class ChannelExchange(Delegate):
    """An exchange with the hooks of `base`. Its averaged fields pass through `channel`."""

    channel: Channel

    @property
    def averaged(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.channel.gathers:
            return ()
        return self.target.averaged

    @property
    def prepares_batches(self) -> bool:
        return self.target.prepares_batches or self.channel.poisons

    @property
    def server_side_weighting(self) -> bool:
        return self.target.server_side_weighting

    # On the server, before clients train

    def broadcast(self, ctx: Context, server: State) -> State:
        memory = memory_of(ctx, server)
        replica: State = memory.get("replica", {})
        down = self.target.broadcast(ctx, own(server)) | replica
        privacy = self.channel.privacy
        if privacy is None or not privacy.adapts or self.channel.clips_on_server:
            return down
        return down | {CHANNEL: {"clip": self._bound(ctx, memory)}}

    def unicast(self, ctx: Context, server: State) -> State:
        return self.target.unicast(ctx, own(server))

    def received_bytes(
        self, ctx: Context, server: State, down: State, clients: Sequence[ClientIndex]
    ) -> Mapping[str, int]:
        if self._downlink is None:
            return super().received_bytes(ctx, server, down, clients)
        return self._downlink.received_bytes(down, memory_of(ctx, server), ctx.round, clients)

    # With a client

    def start(self, ctx: Context, client: State, down: State) -> State:
        return self.target.start(ctx, own(client), own(down))

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        attack = self.channel.attack
        if attack is not None and attack.poisons and self.channel.attacks(ctx):
            batch = attack.poisoned(ctx, batch)
        if self.target.prepares_batches:
            return self.target.prepare(ctx, batch)
        return batch

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        own_client = own(client)
        kept, up = self.target.finish(ctx, work, own_client, own(down), data)
        sent = only(up, self.target.averaged)
        base = received(sent, own(down), ctx.task.untrained)
        private = made_private(self.channel, ctx, sent, base)
        decoded, memory = compressed(self.channel, private, base, memory_of(ctx, client))
        changed = attacked(self.channel, ctx, decoded, base)
        note: State = {}
        if not self.channel.clips_on_server:
            bound = down.get(CHANNEL, {}).get("clip", self.channel.clip)
            note = within_bound(self.channel, changed, base, bound)
            changed = clipped_centrally(self.channel, changed, base, bound)
        if self.channel.gathers and self.channel.changes_of_start:
            changed = changes(changed, base, ctx.task.untrained)
        up = up | changed
        if note:
            up = up | {CHANNEL: note}
        return remembering(ctx, kept, client, memory), up

    def sent_bytes(self, up: State) -> Mapping[str, int]:
        compression = self.channel.compression
        sent = only(up, self.target.averaged)
        tensors = []
        for _, tensor in named_tensors(sent):
            tensors.append(tensor)
        sizes = [as_real(tensor).numel() for tensor in tensors if not is_counter(tensor)]
        if compression is None or not sizes:
            return bytes_by_field(up)
        counters = sum(tensor.nbytes for tensor in tensors if is_counter(tensor))
        bytes_of_sent = compression.nbytes(sizes) + counters
        return {"+".join(sent): bytes_of_sent} | bytes_by_field(without(up, sent))

    # On the server, after clients have trained

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        return self.target.weights(ctx, own(server), replies)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        memory = memory_of(ctx, server)
        before: State = {}
        if self._looks_back:
            before = own(self.broadcast(ctx, server))
        cohort = Cohort(replies.mean, _notes(replies), replies.weights)
        bound = self._bound(ctx, memory)
        if self.channel.gathers:
            cohort, memory = self._combined(ctx, before, replies, memory, bound)
        base = received(cohort.mean, before, ctx.task.untrained)
        mean, adapted = protected(self.channel, ctx, cohort, base, bound)
        if adapted is not bound:
            memory = memory | {"clip": adapted}
        mean = ctx.task.to_memory_format(with_variances(ctx, mean))
        gathered: Sequence[str] = ()
        if self.channel.gathers:
            gathered = self.target.averaged
        each = []
        for reply in replies.each:
            each.append(reply._replace(up=without(reply.up, {CHANNEL, *gathered})))
        state = self.target.aggregate(ctx, own(server), Replies(mean, each, replies.weights))
        if self._downlink is not None:
            memory = self._downlink.next_memory(before, self.target.broadcast(ctx, state), memory, ctx)
        return remembering(ctx, state, server, memory)

    @property
    def _looks_back(self) -> bool:
        """Whether the server needs to know what clients have received."""
        return self.channel.gathers or self.channel.sampling == "poisson" or self._downlink is not None

    def _combined(
        self, ctx: Context, before: State, replies: Replies, memory: State, bound: Tensor
    ) -> tuple[Cohort, State]:
        """Return what the rule makes of the updates of a cohort, and the memory with the rule's."""
        buffers = ctx.task.untrained
        values = []
        for reply in replies.each:
            values.append(only(reply.up, self.target.averaged))
        notes: Sequence[State] = _notes(replies)
        if not any(values):
            return Cohort({}, notes, replies.weights), memory
        base = received(values[0], before, buffers)
        if self.channel.changes_of_start:
            values = [values_of(value, base, buffers) for value in values]
        if self.channel.clips_on_server:
            values = with_crafted(self.channel, values, base, replies.each)
            values, notes = clipped_here(self.channel, values, base, bound)
        updates = Updates(values, base, replies.weights, buffers)
        mean, kept = self.channel.rule.combine(updates, self.channel.byzantine, memory.get("rule", {}))
        if kept:
            memory = memory | {"rule": kept}
        return Cohort(mean, notes, replies.weights), memory

    def _bound(self, ctx: Context, memory: State) -> Tensor:
        """Return the present clipping bound; infinite without privacy."""
        bound: Tensor = torch.tensor(self.channel.clip, device=ctx.task.device)
        if "clip" in memory:
            bound = memory["clip"]
        return bound

    @property
    def _downlink(self) -> Downlink | None:
        compression = self.channel.compression
        if compression is None or compression.down is None:
            return None
        return Downlink(compression.down)


# The field of the channel, with an entry for each exchange of a round


def own(state: State) -> State:
    """Return a state or payload without the channel's field, as the method knows it."""
    if CHANNEL in state:
        return without(state, {CHANNEL})
    return state


def memory_of(ctx: Context, state: State) -> State:
    """Return what the channel has kept in `state` for this exchange."""
    kept: State = state.get(CHANNEL, {})
    memory: State = kept.get(str(ctx.exchange), {})
    return memory


def _notes(replies: Replies) -> list[State]:
    """Return what each client says to the channel beside what it sends."""
    return [reply.up.get(CHANNEL, {}) for reply in replies.each]


def remembering(ctx: Context, state: State, before: State, memory: State) -> State:
    """Return the method's next `state` with what the channel keeps; other exchanges keep what they had `before`."""
    kept = before.get(CHANNEL, {})
    if memory:
        kept = kept | {str(ctx.exchange): memory}
    if kept:
        return own(state) | {CHANNEL: kept}
    return own(state)
