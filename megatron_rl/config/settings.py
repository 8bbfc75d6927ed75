"""All settings for users, one class per component.

Unknown keys are errors. No set value is rewritten: `decided` fills in the open ones, and `train
--check` prints them with the derived values. Field descriptions are the help texts of the command line.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.data_settings import DataSettings
from megatron_rl.config.eval_sets import EvalSettings
from megatron_rl.config.order import InOrder, Order
from megatron_rl.config.section import FilePath, Seconds, Section


class RunSettings(Section):
    """The run as a whole."""

    directory: FilePath = Field(description="Directory of this run: settings, buffer, metrics, checkpoints, summary.json.")
    seed: int = Field(0, ge=0, description="Seed of every random choice: data order, sampling.")
    num_steps: int = Field(100, ge=1, description="Rollout batches to train on.")
    save_interval: int = Field(50, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    keep_groups: int = Field(
        4,
        ge=0,
        le=2**20,
        description="Groups of each step whose tokens, masks, log-probs, versions, entropies and advantages stay in the buffer "
        "(37 bytes a token), for readers; of others they go with the last checkpoint that could come back to them. A step with no more "
        "groups stays whole, with the engines' records, for train --replay.",
    )
    keep_interval: int = Field(
        0, ge=0, description="Checkpoints of its multiples stay for good, without samples; 0 keeps the newest alone."
    )
    export_interval: int = Field(
        0, ge=0, description="Steps between Hugging Face directories that stay in exports; 0 leaves those of checkpoints alone."
    )


class ModelSettings(Section):
    """The policy."""

    path: FilePath = Field(description="Model directory: config.json, tokenizer, and safetensors or what convert has written.")
    teacher: FilePath | None = Field(
        None, description="Directory of a teacher with the policy's tokenizer, for objective.distillation_coef."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto is float32 on CPU and bfloat16 on GPU.")
    attention: Literal["auto", "transformer_engine", "torch"] = Field(
        "auto", description="auto takes TransformerEngine where it is installed and computes the model on the GPU, else torch."
    )
    megatron: dict[str, Any] = Field(default_factory=dict, description="Fields of megatron-core's TransformerConfig, by their own names.")
    deadline_s: Seconds | None = Field(
        None,
        description="Deadline of a start of ranks or engines, a weight sync, a training step and a request, in seconds; each by the bytes "
        "of the model or the tokens of a response when not set.",
    )


class SamplingSettings(Section):
    """Sampling of responses."""

    temperature: float = Field(
        1.0, ge=0.01, le=100, description="Softmax temperature, the trainer's too; near 0 an engine takes the likeliest token, no sample."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Draw from the likeliest tokens, which have this probability together.")
    top_k: int | None = Field(
        None, ge=2, description="Draw from so many likeliest tokens; with top_p or min_p half of what an engine records."
    )
    min_p: float = Field(0.0, ge=0, lt=1, description="Draw from tokens with this share of the likeliest's probability.")
    entropy: EntropyAware | None = Field(
        None, description="Entropy-aware sampling of what is trained on, instead of the three above; the policy's own draw when not set."
    )
    max_response_tokens: int = Field(1024, ge=1, description="Token budget of one answer of an engine.")
    stop: tuple[str, ...] = Field((), description="Strings that end a response; the tokens that complete one are kept.")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="Tokens that end a response besides end-of-sequence.")


class FilterSettings(Section):
    """Your own choice of groups to train on; with objective.zero_variance resample other prompts replace the rest."""

    function: str = Field(description="package.module:function; it returns None to keep a group, or why not.")
    args: dict[str, Any] = Field(default_factory=dict, description="Own arguments of the function, by the names that it gives them.")


class AgentSettings(Section):
    """Agents that ask an endpoint by OpenAI's or Anthropic's API, commands on all nodes of the run."""

    command: tuple[str, ...] = Field((), description='Program and arguments; the last line of output, as {"reward": 0.5}, is the reward.')
    function: str | None = Field(None, description="Your own async function, package.module:function, instead of a command.")
    max_processes: int | None = Field(
        None,
        ge=1,
        le=2**12,
        description="Commands at once over all nodes, and as many more in an evaluation; 4 for each core when not set.",
    )
    sampling: Literal["refuse", "override"] = Field(
        "refuse",
        description="Answer to a request for another model or sampling than the run's: an error, or the run's, and a count in the metrics.",
    )

    @model_validator(mode="after")
    def _one_form(self) -> "AgentSettings":
        if bool(self.command) == bool(self.function):
            got = f"command {list(self.command)} and function {self.function}" if self.command else "neither command nor function"
            raise ValueError(f"has {got}, needs exactly one of them")
        return self


class RolloutSettings(Section):
    """Generation."""

    num_engines: int = Field(1, ge=1, le=2**14, description="SGLang servers; from runtime.cluster when not set.")
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    max_concurrent_requests: int | None = Field(
        256, ge=1, description="Requests in flight at one engine; every sample is one. null: as its memory, which it reports, allows."
    )
    engine_restarts: int = Field(
        4, ge=0, le=1000, description="Starts of a dead or failing engine within an hour; beyond them it stays away, as on shared devices."
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Weight versions that a token may be older than those of the step that trains on it. 0 generates and trains in turns; "
        "k generates up to k later steps while the trainer trains.",
    )
    order: Order = Field(InOrder(), description="Which of the finished groups a step trains on.")
    function: str | None = Field(None, description="Your own rollout, package.module:function; the default is one turn.")
    environment: str | None = Field(None, description="Tools and replies for many turns, package.module:Class; instead of a function.")
    agent: AgentSettings | None = Field(None, description="Agents that know only a URL and a key; instead of both.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of your own rollout, by the names that it gives them.")
    max_turns: int = Field(
        16, ge=1, le=2**10, description="Answers of the policy in one trajectory of an environment, then truncated, or to one agent."
    )
    step_timeout_s: Seconds = Field(60.0, description="Deadline of an environment's reset and of each answer, in seconds; then it fails.")
    renderer: str | None = Field(None, description="Messages to tokens: a name of the library renderers; from the model when not set.")
    timeout_s: Seconds = Field(1800.0, description="Deadline of an attempt at a prompt's samples, without waits for an engine, in seconds.")
    max_error_rate: float = Field(0.25, ge=0, le=1, description="Share of a step's trajectories that fail above which the run stops.")
    filter: FilterSettings | None = Field(None, description="Your own choice of the groups to train on; all of them when not set.")
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="SGLang's arguments, by their own names; an engine has tp_size GPUs on nnodes nodes."
    )

    @property
    def is_single_turn(self) -> bool:
        """True without code of the user's own."""
        return self.function is None and not self.is_hosted

    @property
    def is_hosted(self) -> bool:
        """True where each trajectory has an environment or an agent of its own."""
        return self.environment is not None or self.agent is not None

    @property
    def name(self) -> str:
        """The rollout in words, for messages."""
        if self.agent is not None:
            return f"rollout.agent {self.agent.function or ' '.join(self.agent.command)}"
        return f"rollout.environment {self.environment}" if self.environment else f"rollout.function {self.function or 'single_turn'}"

    @field_validator("sglang")
    @classmethod
    def _engine_size(cls, value: dict[str, Any]) -> dict[str, Any]:
        size = value.get("tp_size", 1)
        if type(size) is not int or not 1 <= size <= 2**10:
            raise ValueError(f"rollout.sglang.tp_size is {size!r}, needs an integer from 1 to {2**10}, the GPUs of an engine; change it")
        nodes = value.get("nnodes", 1)
        if type(nodes) is not int or nodes < 1 or size % nodes:
            raise ValueError(
                f"rollout.sglang.nnodes is {nodes!r}, needs a divisor of tp_size {size}: an engine has as many GPUs on each of its nodes; "
                f"change it"
            )
        return value

    @property
    def ranks_per_engine(self) -> int:
        """Number of processes of one engine that hold weights, on GPUs one each."""
        return int(self.sglang.get("tp_size", 1))

    @property
    def nodes_per_engine(self) -> int:
        """Number of nodes of one engine, each with a server."""
        return int(self.sglang.get("nnodes", 1))


class RewardSettings(Section):
    """The reward function, run in isolated worker processes."""

    function: str | None = Field(
        "megatron_rl.rewards.math:score",
        description="package.module:function, or the name of a built-in one, as math or code; null where an environment gives rewards.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Own arguments of the function, by the names that it gives them.")
    check_labels: bool = Field(True, description="Refuse rows whose label a built-in function does not score as an answer, at the start.")
    timeout_s: Seconds = Field(30.0, description="Deadline of one call, in seconds; the worker is then killed.")
    max_error_rate: float = Field(0.05, ge=0, le=1, description="Share of errors and timeouts in a batch above which the run stops.")


class TopologySettings(Section):
    """The arrangement of ranks. num_ranks = tp x pp x cp x dp; dp follows."""

    num_ranks: int = Field(1, ge=1, le=2**17, description="Megatron ranks (processes); from runtime.cluster when not set.")
    tp: int = Field(1, ge=1, description="Tensor parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline parallel size.")
    vpp: int = Field(1, ge=1, description="Virtual pipeline stages per rank.")
    cp: int = Field(1, ge=1, description="Context parallel size.")
    ep: int = Field(1, ge=1, description="Expert parallel size.")
    etp: int | None = Field(None, ge=1, description="Tensor parallel size of experts; tp when not set.")
    sequence_parallel: bool = Field(False, description="Shard activations between tensor parallel regions over the sequence.")

    @property
    def model_ranks(self) -> int:
        """Number of ranks with one copy of the model, context parallel ranks included."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data parallel size: the number of copies of the model."""
        return self.num_ranks // self.model_ranks

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp


class ScheduleSettings(Section):
    """The learning rate over optimizer steps. The peak is optimizer.lr, the floor optimizer.min_lr."""

    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    decay_style: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = Field(
        "constant", description="How the rate falls after the warm-up. wsd is constant until the last tenth of the steps, which anneal it."
    )
    decay_steps: int | None = Field(None, ge=1, description="Optimizer steps until the floor; all of the model in the run when not set.")


class CriticSettings(Section):
    """The value model of objective.advantage.kind gae: the policy's architecture, initial weights and ranks, with one output."""

    optimizer: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of megatron-core's OptimizerConfig in which the critic differs from training.optimizer; lr and min_lr are "
        "10 times the policy's when not set.",
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps at the start of the run in which only the critic learns.")


class TrainingSettings(Section):
    """The Megatron side."""

    topology: TopologySettings = Field(default_factory=TopologySettings)
    optimizer_steps_per_batch: int = Field(1, ge=1, description="Optimizer steps on one rollout batch.")
    max_tokens_per_micro_batch: int = Field(
        16384,
        ge=1,
        description="Token budget of a packed micro-batch, per context parallel rank; the longest sequence when not set and "
        "that is longer.",
    )
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    optimizer: dict[str, Any] = Field(default_factory=dict, description="Fields of megatron-core's OptimizerConfig, by their own names.")
    ddp: dict[str, Any] = Field(default_factory=dict, description="Fields of Megatron's DistributedDataParallelConfig, by their own names.")
    frozen: tuple[str, ...] = Field(
        (),
        description="Patterns of Hugging Face tensor names, such as model.embed_tokens.* or *.mlp.gate.weight: these weights are not "
        "trained, neither the policy's nor the critic's.",
    )
    critic: CriticSettings = Field(default_factory=CriticSettings)
    routing_replay: bool = Field(False, description="Route each token in training to the experts that the engine chose and recorded (R3).")
    reference_interval: int = Field(
        0,
        ge=0,
        description="Rollout batches from one to the next that measures the KL to the initial policy (train/kl_*) although no term of the "
        "objective reads it; each costs a forward pass. 0 measures it only with such a term. Without both, no reference is kept.",
    )

    def keeps_reference(self, objective: Objective) -> bool:
        """Return True when ranks keep the initial weights, for the `objective` or to measure their KL."""
        return objective.needs_reference or (self.reference_interval > 0 and objective.trains_by_rewards)


class WeightSettings(Section):
    """Trainer to engine."""

    transport: Literal["broadcast", "disk", "ipc"] | None = Field(
        None,
        description="broadcast sends tensors through a process group (gloo on CPU, NCCL on GPU), disk writes and reads files, ipc shares "
        "the memory of the GPUs of runtime.colocate, or of the host on CPU. Not set: ipc with runtime.colocate, else broadcast.",
    )
    delta: bool = Field(
        False,
        description="With broadcast or disk, send elements that changed since the last sync where they are few, and all weights at the "
        "first, the second and every 10th sync. Rank 0 then keeps a copy of the weights in host memory.",
    )
    parity_threshold: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Largest median |difference| between engine and trainer log-probs of tokens that the engine sampled after the first "
        "sync, in nats, with which the other limits scale; when not set 1e-4 in float32; in bfloat16 0.04, and 0.05 for a mixture of "
        "experts with training.routing_replay, 0.1 without.",
    )


class ClusterSettings(Section):
    """The machines, for what is planned without them. A run asks Ray, and stops when it finds less than this."""

    num_nodes: int | None = Field(None, ge=1, le=2**17, description="Nodes to use; as many as are needed when not set.")
    gpus_per_node: int | None = Field(None, ge=1, le=2**10, description="GPUs of a node to use; all of them when not set.")
    gpu: str | None = Field(None, description="Type of the GPUs, such as H100-80: what `train --check --config-only` plans memory for.")


class RuntimeSettings(Section):
    """Processes."""

    ray_address: str | None = Field(None, description="HOST:PORT of a running Ray cluster; a local one is started when not set.")
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    network_interface: str | None = Field(
        None,
        description="Network interface of every node, such as eth0 or ib0, on which ranks and engines meet (gloo, NCCL). Ray has to be "
        "started with this interface's address (--node-ip-address). Each library chooses for itself when not set.",
    )
    restarts: int = Field(
        4, ge=0, le=1000, description="Starts of all ranks within an hour, from the newest checkpoint, after one died or hung."
    )
    colocate: bool = Field(False, description="Let engines and ranks share GPUs in turns: who is not at work puts its memory away.")

    @field_validator("ray_address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        host, _, port = (value or "").rpartition(":")
        if value not in (None, "auto") and not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"is {value}, needs HOST:PORT as `ray start --head` prints it, or auto; leave it out for a Ray of its own")
        return value


class ObserveSettings(Section):
    """Output of a run besides the console, metrics.jsonl and TensorBoard."""

    report_interval: int = Field(
        50, ge=0, description="Steps between writings of report.html, by a process of its own; 0 writes it at the end alone."
    )
    print_samples: int = Field(
        0, ge=0, description="Steps between samples on the console, and texts, tables and histograms of TensorBoard and W&B; 0: none."
    )
    wandb_project: str | None = Field(
        None, description="Weights & Biases project; honours WANDB_NAME, WANDB_RUN_GROUP, WANDB_TAGS and WANDB_MODE=offline."
    )


class Settings(Section):
    """All settings of a run."""

    run: RunSettings
    model: ModelSettings
    data: DataSettings
    objective: Objective = Field(default_factory=Objective)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    weights: WeightSettings = Field(default_factory=WeightSettings)
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    observe: ObserveSettings = Field(default_factory=ObserveSettings)

    @property
    def supervised(self) -> bool:
        """True when targets come from the data file, without an engine or a reward."""
        return not self.objective.trains_by_rewards

    @property
    def weight_transport(self) -> Literal["broadcast", "disk", "ipc"]:
        """Route of weights to engines: weights.transport, or if unset by runtime.colocate."""
        return self.weights.transport or ("ipc" if self.runtime.colocate else "broadcast")

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences of a step: the samples of all groups, or one for each supervised row."""
        return self.data.prompts_per_step * (1 if self.supervised else self.data.samples_per_prompt)

    @property
    def sequences_per_optimizer_step(self) -> int:
        """Number of sequences of an optimizer step."""
        return self.sequences_per_step // self.training.optimizer_steps_per_batch

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the run."""
        return self.run.num_steps * self.training.optimizer_steps_per_batch

    @property
    def policy_steps(self) -> int:
        """Optimizer steps of the policy, over the whole run: without those in which only the critic learns."""
        return self.optimizer_steps - (self.training.critic.warmup_steps if self.objective.has_critic else 0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_tokens + self.rollout.sampling.max_response_tokens
