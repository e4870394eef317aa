"""What must hold of the pool whatever happens: a Hypothesis state machine over calls, boots, faults and leaders."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sllm_runtime.control.providing.packing import nodes_for
from sllm_runtime.control.providing.provider import Shape
from sllm_runtime.control.providing.sizing import SetDesired, need_at
from tests.unit.control.providing.supply import CPU, TIMING, Supplied
from tests.unit.control.world import GIB, deployed, manifest

KEYS = (("a", 1), ("b", 1))
REST_S = 2.5 * TIMING.lost


class Pool(RuleBasedStateMachine):
    """Two functions of one and three cores on nodes of four."""

    @initialize(least=st.integers(0, 1), more=st.integers(1, 3), boot=st.sampled_from([1.0, 15.0, 60.0]))
    def begin(self, least: int, more: int, boot: float) -> None:
        self.world = Supplied(least=least, most=least + more, boot=boot)
        fields = {"concurrency": 1, "max_instances": 8, "keep_alive": 5.0}
        for name, cpu in (("a", 1.0), ("b", 3.0)):
            self.world.view = deployed(self.world.view, manifest(name, cpu=cpu, **fields))

    @rule(key=st.sampled_from(KEYS), calls=st.integers(0, 6))
    def calls_wait(self, key: tuple[str, int], calls: int) -> None:
        self.world.wait_for(key, calls)

    @rule(seconds=st.sampled_from([1.0, 12.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.live_for(seconds)

    @rule()
    def all_calls_end(self) -> None:
        self.world.all_end()

    @rule(broken=st.booleans())
    def the_provider_breaks_or_is_mended(self, broken: bool) -> None:
        self.world.broken = broken

    @rule()
    def another_controller_leads(self) -> None:
        self.world.new_leader()

    @rule(data=st.data(), alive=st.booleans())
    def a_node_falls_silent_or_speaks(self, data: st.DataObject, alive: bool) -> None:
        if self.world.nodes:
            self.world.nodes[data.draw(st.sampled_from(sorted(self.world.nodes)))].alive = alive

    # --- what holds ---------------------------------------------------------------------------------
    @invariant()
    def within_the_bounds(self) -> None:
        for _, action in self.world.actions:
            if isinstance(action, SetDesired):
                assert self.world.least <= action.nodes <= self.world.most
        assert self.world.desired <= self.world.most

    @invariant()
    def no_node_in_use_was_given_back(self) -> None:
        assert self.world.harmed == []

    def teardown(self) -> None:
        """Left in peace: who waits gets a node, as long as there may be more; a constant demand moves nothing; without
        demand the least is left."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.broken, world.boot = False, min(world.boot, 60.0)
        for node in world.nodes.values():
            node.alive = True
        world.wait_for(KEYS[0], 2)
        world.live_for(REST_S)
        assert not world.view.demand(KEYS[0]) or world.desired == world.most
        done = len(world.actions)
        world.live_for(REST_S)
        assert world.actions[done:] == [], "the same demand, another decision"
        for _ in range(4):
            world.all_end()
            world.live_for(REST_S / 4)
        assert world.desired == world.least


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)


def test_packing_wastes_little() -> None:
    world = Supplied()
    for name, cpu in (("a", 1.0), ("b", 3.0)):
        world.view = deployed(world.view, manifest(name, cpu=cpu))
    small, large = (need_at(world.view, key) for key in KEYS)
    shape = Shape(cpu=CPU, memory=64 * GIB)
    for count in range(6):
        assert nodes_for([small, large] * count, shape) == count, "one of each fills a node"
        assert nodes_for([small] * 4 * count, shape) == count
        assert nodes_for([large] * count, shape) == count
    assert nodes_for([large], Shape(cpu=1.0, memory=64 * GIB)) == 0, "what fits none needs none"
