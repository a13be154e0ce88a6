"""What happens to updates between clients and server, put together from its four parts."""

import math
from dataclasses import dataclass

from rayfed.algorithm import Context
from rayfed.algorithm import Privacy as Spent
from rayfed.channel.attacks import Attack
from rayfed.channel.compression import Compression
from rayfed.channel.privacy import ADDED, REPLACED, Composition, Privacy
from rayfed.channel.robust import Mean, Rule

_MEAN = Mean()


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Privacy, compression, an attack and a robust rule, and how clients are sampled.

    Attributes:
        attackers: The clients that attack.
        byzantine: The number of attackers in a cohort that the rule tolerates.
        sampling: How cohorts are drawn: "uniform", "poisson" or "without_replacement".
        cohort: The expected number of clients in a round of Poisson sampling.
        changes_of_start: Whether replies of clients that started earlier count as changes since then (FedBuff).
        exchanges: The exchanges of a round.
    """

    privacy: Privacy | None = None
    compression: Compression | None = None
    attack: Attack | None = None
    rule: Rule = _MEAN
    attackers: frozenset[int] = frozenset()
    byzantine: int = 0
    sampling: str = "uniform"
    cohort: int = 1
    changes_of_start: bool = False
    exchanges: int = 1

    @property
    def clip(self) -> float:
        """The first clipping bound; infinite without privacy."""
        if self.privacy is None:
            return math.inf
        return self.privacy.clip

    @property
    def gathers(self) -> bool:
        """Whether the server needs all updates of a cohort at once."""
        return self.rule.gathers or self.crafts

    @property
    def crafts(self) -> bool:
        """Whether attackers make their updates from those of the honest clients."""
        return self.attack is not None and self.attack.knows_others

    @property
    def poisons(self) -> bool:
        """Whether there are attackers that train on other data."""
        return self.attack is not None and self.attack.poisons and bool(self.attackers)

    @property
    def clips_on_server(self) -> bool:
        """Whether the server clips, because attackers see updates before."""
        return self.crafts

    @property
    def depends_on_rounds(self) -> bool:
        """Whether a round depends on how many follow."""
        return self.privacy is not None and self.privacy.depends_on_rounds

    def attacks(self, ctx: Context) -> bool:
        """Return whether the client of `ctx` is an attacker."""
        return ctx.client in self.attackers

    @property
    def neighbours(self) -> str:
        """The notion of neighbouring federations."""
        is_local = self.privacy is not None and self.privacy.local
        if self.sampling == "poisson" and not is_local:
            return ADDED
        return REPLACED

    def composition(self, rounds: int, clients: int, cohort: int) -> Composition:
        """Return how often the first `rounds` rounds with cohorts of that size use a client's data, at most."""
        steps = rounds * self.exchanges
        if self.sampling == "without_replacement":
            cycle = max(1, clients // cohort)  # 1: a cohort of unseen clients may exceed N
            steps = math.ceil(rounds / cycle) * self.exchanges
        amplifies = self.neighbours == ADDED and self.privacy is not None and self.privacy.counts_sampling
        rate = 1.0
        if amplifies:
            rate = self.cohort / clients
        return Composition(rate, steps)

    def multiplier(self, ctx: Context) -> float:
        """Return the scale of the noise over the most that one client can change."""
        if self.privacy is None:
            return 0.0
        return self.privacy.multiplier(self._composition(ctx, ctx.rounds))

    def _composition(self, ctx: Context, rounds: int) -> Composition:
        return self.composition(rounds, ctx.task.num_clients, len(ctx.cohort))

    def sensitivity(self, bound: float, clients: int) -> float:
        """Return the most that one client can change what the server makes of `clients` updates."""
        assert self.privacy is not None, "there is something to protect"
        if self.neighbours == ADDED:
            return bound / (self.privacy.noise_cohort or self.cohort)
        most = self.rule.sensitivity(bound, self.privacy.noise_cohort or clients, self.byzantine)
        assert most is not None, "refused before the start"
        return most

    def spent(self, ctx: Context) -> Spent | None:
        """Return the privacy that the rounds until now have spent, or None without a guarantee."""
        privacy = self.privacy
        if privacy is None:
            return None
        so_far = self._composition(ctx, min(ctx.round, ctx.rounds))  # the final stage spends none
        epsilon = privacy.spent(self.multiplier(ctx), so_far)
        if epsilon is None:
            return None
        other = ""
        if privacy.noise_cohort:
            other = f" of a deployment with cohorts of {privacy.noise_cohort}"
        return Spent(epsilon, f"client{other}", privacy.failure, privacy.accounting, self.neighbours)
