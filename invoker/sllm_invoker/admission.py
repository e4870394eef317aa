"""What a node has, what its instances hold, and whether one more fits. Pure: records in, records or errors out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sllm_runtime.protocol.errors import Conflict, NoCapacity
from sllm_runtime.protocol.node import Gpu, Shared, StartInstance
from sllm_runtime.protocol.quantities import show_bytes


@dataclass(frozen=True)
class Claim:
    """What one instance holds from its admission until its sandbox is gone."""

    cpu: float
    memory: int
    """Bytes of its own: the manifest's memory for each process."""
    gpus: tuple[int, ...] = ()
    weights: dict[str, int] = field(default_factory=dict)
    """Bytes of its models by digest. Those that use one share it: it is promised once."""


@dataclass(frozen=True)
class Ledger:
    """A node's devices and who holds them. Immutable: ``admit`` and ``release`` give the next ledger.

    CPU is a share, not a right: a node may be asked for up to ``cpu_overcommit`` times its cores, since functions
    that are kept alive idle most of the time. Memory and GPUs are never promised twice.
    """

    cpu: float
    memory: int
    gpus: tuple[Gpu, ...] = ()
    cpu_overcommit: float = 1.0
    reserved: int = 0
    """Bytes of ``memory`` that no instance gets: loaderd's chunk pool may grow to its limit."""
    claims: dict[str, Claim] = field(default_factory=dict)

    @property
    def offered_memory(self) -> int:
        """Bytes for instances, over all of them."""
        return max(0, self.memory - self.reserved)

    @property
    def free_cpu(self) -> float:
        """Cores that can still be promised to one instance: never more than there are."""
        return min(self.cpu, self.left_cpu)

    @property
    def left_cpu(self) -> float:
        """Cores that can still be promised to several together."""
        return self.cpu * self.cpu_overcommit - sum(claim.cpu for claim in self.claims.values())

    @property
    def shared(self) -> dict[str, Shared]:
        """Models that are in use, by digest."""
        found: dict[str, Shared] = {}
        for claim in self.claims.values():
            for digest, nbytes in claim.weights.items():
                users = found[digest].instances if digest in found else 0
                found[digest] = Shared(nbytes, users + 1)
        return found

    @property
    def free_memory(self) -> int:
        """Bytes that can still be promised; below 0 when the pool has been given more since."""
        own = sum(claim.memory for claim in self.claims.values())
        return self.offered_memory - own - sum(each.nbytes for each in self.shared.values())

    @property
    def held_gpus(self) -> tuple[Gpu, ...]:
        """The node's GPUs, each with the instance that holds it."""
        holder = {index: name for name, claim in self.claims.items() for index in claim.gpus}
        return tuple(replace_gpu(gpu, holder.get(gpu.index)) for gpu in self.gpus)

    def admit(self, instance: str, claim: Claim) -> Ledger:
        """The ledger with this claim. Raises ``NoCapacity`` naming what is short, ``Conflict`` on a repeated name."""
        if instance in self.claims:
            raise Conflict(f"instance {instance} is already admitted on this node")
        if claim.cpu > self.free_cpu + 1e-9:
            raise NoCapacity(f"instance {instance} needs {claim.cpu:g} CPUs, this node has {self.free_cpu:g} free")
        shared = self.shared
        needed = claim.memory + sum(nbytes for digest, nbytes in claim.weights.items() if digest not in shared)
        if needed > self.free_memory:
            raise NoCapacity(
                f"instance {instance} needs {show_bytes(needed)} of memory,"
                f" this node has {show_bytes(max(0, self.free_memory))} free"
            )
        for index in claim.gpus:
            self._check_gpu(instance, index)
        if len(set(claim.gpus)) != len(claim.gpus):
            raise Conflict(f"instance {instance} names a GPU twice: {claim.gpus}")
        return replace(self, claims={**self.claims, instance: claim})

    def _check_gpu(self, instance: str, index: int) -> None:
        gpu = next((gpu for gpu in self.held_gpus if gpu.index == index), None)
        if gpu is None:
            raise NoCapacity(f"instance {instance} needs GPU {index}, this node has {len(self.gpus)}")
        if gpu.used_by is not None:
            raise NoCapacity(f"instance {instance} needs GPU {index}, which instance {gpu.used_by} holds")

    def release(self, instance: str) -> Ledger:
        """The ledger without this instance's claim; one that has none is no error."""
        return replace(self, claims={name: claim for name, claim in self.claims.items() if name != instance})


def replace_gpu(gpu: Gpu, used_by: str | None) -> Gpu:
    """``gpu`` as held by ``used_by``."""
    return Gpu(index=gpu.index, kind=gpu.kind, memory=gpu.memory, used_by=used_by)


def claim_of(order: StartInstance) -> Claim:
    """What ``order`` holds once it is begun."""
    manifest, processes = order.manifest, order.manifest.parallelism.processes
    return Claim(manifest.cpu * processes, manifest.memory * processes, order.gpus, order.models)
