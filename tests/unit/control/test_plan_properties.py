"""What must hold whatever happens: a Hypothesis state machine over calls, failures, losses and lost commands."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sllm_runtime.control import backoff
from sllm_runtime.control.deletion import leaving
from sllm_runtime.control.scheduling.startup import StartupTime
from sllm_runtime.control.view import Key
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, final
from tests.fixtures.examples import examples
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest

FUNCTIONS = ("a", "b", "c", "d")
MODELS = {
    name: ModelRecord(digest=f"sha256:{name}", uri=f"s3://m/{name}", nbytes=10**9, partitions=(10**9,))
    for name in "abd"
}
"""Read from a disk in a second, from the store in ten."""
CARRIES = ("engine:ours", "exact_resume")
CALL_S = 0.5
names = st.sampled_from(FUNCTIONS)
nodes = st.sampled_from(["n1", "n2"])


class Cluster(RuleBasedStateMachine):
    """Two nodes with accelerators, and four functions, three of them with models, one of which lies on one node
    only: so starts wait, lack places, make room by ending and by moving."""

    @initialize(
        most=st.integers(1, 3),
        least=st.integers(0, 1),
        keep_alive=st.sampled_from([0.0, 3.0]),
        gpu=st.booleans(),
        first=st.lists(st.tuples(names, st.booleans()), max_size=6),
    )
    def begin(self, most: int, least: int, keep_alive: float, gpu: bool, first: list[tuple[str, bool]]) -> None:
        """``first``: what has an instance, and whether that works."""
        self.world = World(FakeNode("n1", cpu=3.0, gpus=2), FakeNode("n2", cpu=2.0, gpus=2))
        self.world.policy = StartupTime(settled_s=1.0)
        self.world.nodes["n1"].models = tuple(MODELS[name].digest for name in "abd")
        self.world.nodes["n2"].models = tuple(MODELS[name].digest for name in "bd")
        self.world.hear_all()
        fields = {"max_instances": most, "keep_alive": keep_alive, "concurrency": 2, "engine": True}
        kind = {"gpu": "L4"} if gpu else {}
        self._deploy("a", min_instances=least, gpu="L4", **fields)
        self._deploy("b", **kind, **fields)
        self._deploy("c")
        self._deploy("d", gpu="L4", **fields)
        for name, work in first:
            self.world.wait_for((name, 1), 1)
            self.world.plan()
            self.starts_succeed(work, 0.0)
        self.world.turn(1.5)

    def _deploy(self, name: str, **fields: object) -> None:
        model = MODELS.get(name)
        what = manifest(name, **fields, **({"model": model.uri} if model is not None else {}))
        view = deployed(self.world.view, what)
        if model is not None:
            record = msgspec.structs.replace(view.versions[name, 1], model=model.digest)
            view = view.put_model(model).put_version(record)
        self.world.view = view

    # --- what happens -------------------------------------------------------------------------------
    @rule(name=names, calls=st.integers(0, 9))
    def calls_wait(self, name: str, calls: int) -> None:
        if name in self.world.view.functions:
            self.world.wait_for((name, 1), calls)

    @rule(deliver=st.booleans())
    def step(self, deliver: bool) -> None:
        before = dict(self.world.view.failures)
        known = set(self.world.view.instances)
        self.world.plan(deliver=deliver)
        for instance in self.world.view.instances.values():
            if instance.record.instance in known:
                continue
            failure = before.get(instance.key)
            blocked = failure is not None and failure.blocking and self.world.now < failure.until
            assert not blocked, "a start was made before the back-off was over"

    @rule(seconds=st.sampled_from([0.3, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.turn(seconds)

    @rule(work=st.booleans(), seconds=st.sampled_from([0.0, 1.5]))
    def starts_succeed(self, work: bool, seconds: float) -> None:
        """And have calls at once, or do not."""
        for key in self.world.view.waiting:
            self.world.wait_for(key, self.world.view.demand(key) - 1)
        for node in self.world.nodes.values():
            for name, status in tuple(node.instances.items()):
                if status.state is InstanceState.STARTING:
                    node.set(name, InstanceState.READY, capabilities=CARRIES, fingerprint="f", running=int(work))
        self.world.hear_all()
        self.world.turn(seconds)

    @rule(data=st.data(), outcome=st.sampled_from(["ready", "failed", "lost", "busy", "idle"]))
    def an_instance_changes(self, data: st.DataObject, outcome: str) -> None:
        there = [
            (node, status)
            for node in self.world.nodes.values()
            for status in node.instances.values()
            if not final(INSTANCE, status.state)
        ]
        if not there:
            return
        node, status = data.draw(st.sampled_from(there))
        name, starting = status.instance, status.state is InstanceState.STARTING
        if outcome == "ready" and starting:
            node.set(name, InstanceState.READY, capabilities=CARRIES, fingerprint="f")
        elif outcome == "failed" and starting:
            node.set(name, InstanceState.FAILED, ERROR)
        elif outcome == "lost" and not starting:
            node.set(name, InstanceState.LOST)
        elif outcome == "busy" and status.state is InstanceState.READY:
            node.set(name, InstanceState.READY, running=1, idle_s=0.0)
        elif outcome == "idle" and status.state is InstanceState.READY:
            ended = status.running
            node.set(name, status.state, running=0, idle_s=0.0, served=status.served + ended)
            node.set(name, status.state, worked_s=status.worked_s + ended * CALL_S)
        self.world.hear(node.name)

    @rule(name=st.sampled_from(["n1", "n2"]))
    def a_node_restarts(self, name: str) -> None:
        self.world.nodes[name].restart()
        self.world.hear(name)

    @rule(name=st.sampled_from(["n1", "n2"]), alive=st.booleans())
    def a_node_falls_silent_or_speaks(self, name: str, alive: bool) -> None:
        self.world.nodes[name].alive = alive

    @rule(name=nodes, draining=st.booleans())
    def a_node_drains(self, name: str, draining: bool) -> None:
        self.world.nodes[name].draining = draining
        self.world.hear(name)

    @rule(name=names, force=st.booleans())
    @precondition(lambda self: len(self.world.view.functions) > 1)
    def a_function_is_deleted(self, name: str, force: bool) -> None:
        if name in self.world.view.functions:
            self.world.view = leaving(self.world.view, name, force=force)

    # --- what holds ---------------------------------------------------------------------------------
    @invariant()
    def never_more_than_max_instances(self) -> None:
        """But for what is to relieve one that runs, until that is told where its calls go."""
        relieved = {
            move.source for move in self.world.view.migrations.values() if move.destination and move.ended is None
        }
        for key, record in self.world.view.versions.items():
            assert len({*self.world.live(key)} - relieved) <= record.manifest.max_instances

    @invariant()
    def no_node_is_overcommitted(self) -> None:
        for name, node in self.world.nodes.items():
            placed = [i for i in self.world.view.instances.values() if i.record.node == name and not i.ended]
            gpus = [index for instance in placed for index in instance.gpus]
            assert len(gpus) == len(set(gpus)), "an accelerator was given twice"
            assert sum(instance.manifest.cpu for instance in placed) <= node.cpu

    @invariant()
    def no_start_is_sent_to_a_node_that_has_no_room_for_it(self) -> None:
        assert not self.world.refusals

    @invariant()
    def deleted_functions_have_no_live_instance_and_no_route(self) -> None:
        for name, record in self.world.view.functions.items():
            if record.deleting:
                assert self.world.live((name, 1)) == []
                assert not self.world.view.routable((name, 1))

    @invariant()
    def a_failure_is_over_within_the_longest_back_off(self) -> None:
        for failure in self.world.view.failures.values():
            assert failure.until - self.world.now <= backoff.LONGEST_S

    def teardown(self) -> None:
        """Left in peace, the cluster comes to rest: the minimum runs, nothing else does, every command has worked."""
        if not hasattr(self, "world"):
            return
        for name in FUNCTIONS:
            self.world.wait_for((name, 1), 0)
        for _ in range(40):
            for node in self.world.nodes.values():
                node.alive, node.draining = True, False
                _let_end(node)
            self.world.turn(2.0)
        for name, record in self.world.view.functions.items():
            self._at_rest((name, 1), deleting=record.deleting)

    def _at_rest(self, key: Key, *, deleting: bool) -> None:
        record = self.world.view.versions[key]
        there = [
            status
            for node in self.world.nodes.values()
            for status in node.instances.values()
            if status.function == key[0] and not final(INSTANCE, status.state)
        ]
        keep_alive = record.manifest.keep_alive
        if (isinstance(keep_alive, str) or keep_alive > 10) and not deleting:
            return
        wanted = 0 if deleting else record.manifest.min_instances
        assert len(there) == wanted, f"{key} has {there}"
        assert len(self.world.view.of(key)) == wanted


def _let_end(node: FakeNode) -> None:
    """Calls end, starts succeed, drained instances stop."""
    for name, status in tuple(node.instances.items()):
        if status.running:
            node.set(name, status.state, running=0, idle_s=0.0)
        if status.state is InstanceState.STARTING:
            node.set(name, InstanceState.READY, capabilities=CARRIES, fingerprint="f")
        if status.state is InstanceState.DRAINING:
            node.set(name, InstanceState.STOPPED)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
