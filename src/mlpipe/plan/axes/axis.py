"""What an axis of the mesh is told, and what it answers. Standard library only."""

from typing import Literal, NamedTuple, Protocol

from mlpipe._core.pipelines import DEFAULT, Schedule
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.settings import Communication, ContextExchange
from mlpipe.plan.shapes.shape import Activations, ParameterCounts, StepShape
from mlpipe.plan.sizes import DDP_BUCKET_BYTES
from mlpipe.plan.tensors import GRADIENT_BYTES, Group, RankTensors, total
from mlpipe.plan.wire import Wire


class Exchanged(NamedTuple):
    """What replicas send of gradients, where that is not the gradients themselves: bytes in all-reduces and
    in all-gathers, each rank's own part. `coded_params`: so many values are read and written to make it.
    `kept_copies`: of the gradients' size, between steps. Of islands, which do so once in many steps: a step's
    share; `hidden_ratio`: the part of all steps' computing beside which something travels. `elsewhere`: to
    replicas that are not on this mesh, whose own ones send gradients."""

    reduced_bytes: float
    gathered_bytes: float
    coded_params: float
    kept_copies: int = 1
    hidden_ratio: float = 0.0
    elsewhere: bool = False


class Layout(NamedTuple):
    """How the work lies on the ranks: the mesh and the flags of the TrainPlan, which say there what they
    mean."""

    mesh: Mesh
    reshard_after_forward: bool = True
    shard_optimizer: bool = False
    reduce_gradients: Literal["last", "every"] = "last"
    schedule: Schedule = DEFAULT  # of a pipeline
    communication: Communication = "collective"
    context_exchange: ContextExchange = "all_gather"
    exchanged: Exchanged | None = None  # None: gradients, in fp32

    @property
    def exchanged_here(self) -> Exchanged | None:
        """None: gradients."""
        return None if self.exchanged is not None and self.exchanged.elsewhere else self.exchanged

    @property
    def num_shards(self) -> int:
        """So many ranks share the weights that one of them computes with: those of `dp_shard`, and with them
        those of `cp`, which need the same ones."""
        return self.mesh.dp_shard * self.mesh.cp if self.mesh.dp_shard > 1 else 1

    @property
    def num_replicas(self) -> int:
        """So many have the same weights or shards, and other gradients."""
        return self.mesh.dp_replicate * self.mesh.dp_shard * self.mesh.cp // self.num_shards

    @property
    def num_updating_ranks(self) -> int:
        """Among so many ranks the update of a parameter is split."""
        return self.num_shards * (self.mesh.dp_replicate if self.shard_optimizer else 1)

    @property
    def shard_stride(self) -> int:
        """Ranks between neighbours that share weights; between those of replicas `replica_stride`."""
        return self.mesh.tp

    @property
    def replica_stride(self) -> int:
        return self.shard_stride * self.num_shards

    def stage_stride(self, each: int) -> int:
        """Ranks between neighbouring stages, on machines of `each`; by their places, if these are whole
        (`Mesh.number_at`)."""
        mesh = self.mesh
        whole = mesh.nodes_of_weights(each) is not None
        return mesh.dp_shard * mesh.cp * mesh.tp if whole else mesh.world_size // mesh.pp

    def replicas_over(self, each: int) -> int:
        """Ranks over which replicas of one stage reach, by the same places."""
        parted = self.mesh.dp_replicate > 1 and self.mesh.nodes_of_weights(each) is not None
        return self.mesh.world_size if parted else self.num_replicas * self.replica_stride


class RankWork(NamedTuple):
    """What one rank does in a step, of its part of the model. `overlap`: collectives run beside computing,
    which needs a GPU: on CPU both want the same cores."""

    parameters: ParameterCounts
    activations: Activations
    step: StepShape
    layout: Layout
    optimizer: OptimizerCost
    overlap: bool
    kv_bytes: int = 0  # as of `Passes`
    expert_params: int = 0

    def optimizer_states(self, num_ranks: int) -> Group:
        """On the device, split over so many. A CPU is its own host."""
        if self.overlap:
            return self.optimizer.states_on_gpu(self.parameters.trained, num_ranks)
        return self.optimizer.states(self.parameters.trained, num_ranks)

    @property
    def exchange_bytes(self) -> int:
        """What is kept from step to step for what replicas send instead of gradients, and a bucket of it that
        arrives."""
        if (exchanged := self.layout.exchanged) is None:
            return 0
        layout = self.layout
        num_ranks = layout.num_updating_ranks if exchanged.elsewhere else layout.num_shards
        own = total(self.parameters.trained.sharded(num_ranks, GRADIENT_BYTES))
        return exchanged.kept_copies * own + min(own, DDP_BUCKET_BYTES)

    @property
    def rebuilt_bytes(self) -> int:
        """At the backward pass of a block: what recomputation has brought back of it, and what is new."""
        return total(self.activations.rebuilt) + self.activations.backward_bytes

    @property
    def held_bytes(self) -> int:
        """Saved activations with the larger of what follows them: the logits, or the first block's backward
        pass, when the logits are gone."""
        return total(self.activations.saved) + max(self.activations.logit_bytes, self.rebuilt_bytes)


class Passes(NamedTuple):
    """Seconds of one micro-batch on a rank, and what travels. `outside`: embedding, last norm, head and loss;
    `frozen_*`: what of the parameters has no gradients. `width`: bytes of a block's parameter as it travels.
    `stream_bytes`: of the residual stream as matrix products read it, of all tokens of a micro-batch that a
    `tp` group has; `kv_bytes`: of keys and values of whole sequences, of a rank's heads;
    `query_bytes`: of its queries; `attention_seconds`: of a block's forward pass;
    `routed_bytes`: of the rows that go to a block's experts, which have `expert_params` of its parameters.
    `recomputes`: the backward passes compute the forward ones again; `keeps_attention`: but for attention.
    `spared_block_bytes`: of a block, that do not travel since its weights have few bits. `exact_sums`: as of
    `TrainPlan`; then `tp` adds up the gradient of the stream from so many `num_readers` of a block apart."""

    num_blocks: int
    forward_block: float
    backward_block: float  # with what is computed again
    forward_outside: float
    backward_outside: float
    accumulation: int
    block_params: int
    outside_params: int
    width: int
    overlap: bool
    stream_bytes: int = 0
    kv_bytes: int = 0
    query_bytes: int = 0
    attention_seconds: float = 0.0
    routed_bytes: int = 0
    expert_params: int = 0
    recomputes: bool = False
    keeps_attention: bool = False
    frozen_block_params: int = 0
    frozen_outside_params: int = 0
    spared_block_bytes: int = 0
    exact_sums: bool = False
    num_readers: int = 2
    is_first: bool = True  # it has the embedding
    is_last: bool = True  # it has the head

    @property
    def sum_width(self) -> int:
        """Bytes of a number that travels to be added up, along `tp` and `cp`."""
        return GRADIENT_BYTES if self.exact_sums else self.width

    @property
    def forward(self) -> float:
        """Of all blocks and the rest."""
        return self.num_blocks * self.forward_block + self.forward_outside

    @property
    def backward(self) -> float:
        """Likewise."""
        return self.num_blocks * self.backward_block + self.backward_outside

    @property
    def compute(self) -> float:
        """Of all micro-batches of a step, forward and backward."""
        return self.accumulation * (self.forward + self.backward)

    def of_rows(self, number: int, work_ratio: float) -> "Passes":
        """With so many micro-batches, of which each is so much of the work of one that is full."""
        return self._replace(
            accumulation=number,
            forward_block=work_ratio * self.forward_block,
            backward_block=work_ratio * self.backward_block,
            forward_outside=work_ratio * self.forward_outside,
            backward_outside=work_ratio * self.backward_outside,
            routed_bytes=int(work_ratio * self.routed_bytes),
        )

    @property
    def trained_block_params(self) -> int:
        return self.block_params - self.frozen_block_params

    @property
    def trained_outside_params(self) -> int:
        return self.outside_params - self.frozen_outside_params

    @property
    def num_trained_params(self) -> int:
        return self.num_blocks * self.trained_block_params + self.trained_outside_params


class Axis(Protocol):
    """A file of this folder."""

    def divide(self, tensors: RankTensors, work: RankWork) -> RankTensors: ...

    def exposed_seconds(self, passes: Passes, wire: Wire, layout: Layout) -> float: ...
