"""The board of one training."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    LAST_SAVE,
    LAST_STEP,
    MFU_STEPS,
    PROGRESS,
    RUNS,
    WAIT_STEPS,
    WINDOW,
    about,
    board,
    curve,
    dcgm,
    fill,
    heat,
    high_is_good,
    low_is_good,
    mfu,
    names,
    number,
    quantile,
    rate,
    share,
    straggler,
)

from mlpipe._core.mfu import utilization_query


def run_board() -> Dashboard:
    made = board(
        "mlpipe-run",
        "mlpipe / Run",
        "One training: how far it is, how fast, what holds it up. Series vanish when its processes end;"
        " goodput and cost stay,"
        " and `mlpipe report` shows a run that is over.",
        one_run=True,
    )
    left = (
        f"max by (stage) (mlpipe_train_target_steps{{{RUNS}}}) - max by (stage) (mlpipe_train_step{{{RUNS}}})"
    )
    state = [
        number(
            "Progress",
            about(
                "Last step over the number of steps.",
                "it grows.",
                "If it does not, see the time since the last step.",
            ),
            "percentunit",
            {"{{stage}}": PROGRESS.format("stage", RUNS)},
        ),
        number(
            "Time left",
            about(
                "Steps still to do over the present rate of steps.",
                "close to what `mlpipe plan` said.",
                "Much more: look at MFU and the time breakdown. Infinite: no step is being done.",
            ),
            "s",
            {"{{stage}}": f"({left}) / {rate('mlpipe_train_steps_total', 'stage')}"},
        ),
        number(
            "Since the last step",
            about(
                "Time since any rank ended a step.",
                "not much more than the step time.",
                "Past 10 minutes the training hangs.",
                "MlpipeTrainingStalled",
            ),
            "s",
            {"{{stage}}": LAST_STEP.format("stage", RUNS)},
            low_is_good(120, 600),
        ),
        number(
            "Since the last checkpoint",
            about(
                "What a kill would lose now. Before the first checkpoint: time since the start.",
                "about the interval that the pipeline file asks for.",
                "If it grows past that, saves fail or are too rare.",
                "MlpipeCheckpointStale",
            ),
            "s",
            {"{{stage}}": LAST_SAVE.format("stage", RUNS)},
            low_is_good(1800, 3600),
        ),
        number(
            "MFU",
            about(
                "Model FLOPs utilization: FLOPs that the model needs over what all devices could do.",
                "0.35 and more on GPUs for a dense model past 1e9 parameters; small models stay below.",
                "If it is low, see the time breakdown.",
                "MlpipeMfuDropped",
            ),
            "percentunit",
            {"{{stage}}": mfu("stage")},
            MFU_STEPS,
        ),
        number(
            "Ranks scraped",
            about(
                "Ranks whose series Prometheus has, over those of the training.",
                "100 %.",
                "Less: a rank died, or its port is not reached.",
                "MlpipeRankNotScraped",
            ),
            "percentunit",
            {
                "{{stage}}": f"count by (stage) (mlpipe_train_world_size{{{RUNS}}})"
                f" / max by (stage) (mlpipe_train_world_size{{{RUNS}}})"
            },
            ((None, "red"), (1, "green")),
        ),
        names(
            "State",
            about(
                "Where the run stands, from the exporter; it stays when the run is over.",
                "running or done.",
                "failed: `mlpipe report` says by what.",
                "MlpipeJobFailed",
            ),
            {"{{run}}: {{state}}": f"group by (run, state) (mlpipe_run_state_info{{{RUNS}}})"},
            width=12,
            links={},
        ),
        names(
            "Jenkins build",
            about(
                "The build that made the run, from the exporter. Nothing where there was none.",
                "a click opens it, or the page that `mlpipe report` left there.",
                "A build that is over need not mean a run that is: see the state.",
            ),
            {"{{jenkins_build}}": f"group by (jenkins_build, jenkins_url) (mlpipe_run_build_info{{{RUNS}}})"},
            width=12,
            links={
                "The build": "${__field.labels.jenkins_url}",
                "The report (archived when the build ends)": "${__field.labels.jenkins_url}artifact/.mlpipe/"
                "report.html",
            },
        ),
    ]
    learning = [
        curve(
            "Loss",
            about(
                "Training loss of the last step, in nats per token.",
                "it falls, steeply first.",
                "A jump: look at the gradient norm. A loss that is not finite ends the run.",
            ),
            "none",
            {"{{stage}}": f"max by (stage) (mlpipe_train_loss{{{RUNS}}})"},
            width=6,
        ),
        curve(
            "Validation",
            about(
                "The metrics of the last validation, over all held-out samples. Nothing where there is no"
                " `validate`.",
                "its loss falls with that of the training.",
                "A loss that rises while that of the training falls: it learns by heart; stop, or find data.",
            ),
            "none",
            {"{{stage}} {{metric}}": f"max by (stage, metric) (mlpipe_validation_metric{{{RUNS}}})"},
            width=6,
        ),
        curve(
            "Gradient norm",
            about(
                "Global L2 norm before clipping.",
                "it settles after the warm-up.",
                "Spikes that come with jumps of the loss: lower the learning rate or lengthen the warm-up.",
            ),
            "none",
            {"{{stage}}": f"max by (stage) (mlpipe_train_grad_norm{{{RUNS}}})"},
            width=6,
        ),
        curve(
            "Learning rate",
            about(
                "That of the last step.",
                "the schedule of the pipeline file.",
                "If not, check which plan is running.",
            ),
            "sci",
            {"{{stage}}": f"max by (stage) (mlpipe_train_learning_rate{{{RUNS}}})"},
            width=6,
        ),
        curve(
            "Loss scale of fp16",
            about(
                "By how much gradients are too large on purpose. Nothing in other precisions.",
                "a power of two that doubles every 2000 steps, and is halved at times.",
                "It only falls: gradients overflow at any scale; lower the learning rate, or take bf16.",
            ),
            "short",
            {"{{stage}}": f"max by (stage) (mlpipe_train_loss_scale{{{RUNS}}})"},
            width=12,
        ),
        curve(
            "Steps that fp16 skipped",
            about(
                "Share of the steps that updated nothing, since a gradient was too large. Nothing in other"
                " precisions.",
                "a few at the start, then about one in 2000.",
                "Above 1 % the training learns less than its steps say.",
            ),
            "percentunit",
            {
                "{{stage}}": f"{rate('mlpipe_train_skipped_steps_total', 'stage')}"
                f" / {rate('mlpipe_train_steps_total', 'stage')}"
            },
            width=12,
        ),
    ]
    first = f'{RUNS}, rank="0"'
    plain, sent, waits, step = (
        rate(f"mlpipe_train_{counter}", "stage", first)
        for counter in (
            "exchanged_plain_bytes_total",
            "exchanged_bytes_total",
            "collective_wait_seconds_total",
            "step_duration_seconds_sum",
        )
    )
    speed = [
        curve(
            "Tokens per second",
            about(
                "Over all ranks.",
                "flat.",
                "Dips at checkpoints are their stall; a lasting drop shows in the time breakdown.",
            ),
            "short",
            {"{{stage}}": rate("mlpipe_train_tokens_total", "stage")},
        ),
        curve(
            "MFU and HFU",
            about(
                "MFU: FLOPs that the model needs, over the peak that the plan names; HFU: with those that"
                " activation checkpointing does again; of achievable: needed FLOPs over the best matrix"
                " product measured on the device.",
                "flat; HFU above MFU only where activations are recomputed.",
                "A drop against the hour before raises an alert.",
                "MlpipeMfuDropped",
            ),
            "percentunit",
            {
                "{{stage}} MFU": mfu("stage"),
                "{{stage}} HFU": utilization_query(
                    flops="mlpipe_train_hardware_flops_total", by="stage", where=RUNS, window=WINDOW
                ),
                "{{stage}} of achievable": utilization_query(
                    peak="mlpipe_train_achievable_flops", by="stage", where=RUNS, window=WINDOW
                ),
            },
            MFU_STEPS,
        ),
        curve(
            "Step time",
            about(
                "Median and 99th percentile of a step's wall time, read from buckets. Equal on all ranks.",
                "p99 close to p50.",
                "A high p99: checkpoints, the loader, or a neighbour on the node.",
            ),
            "s",
            {
                "p50": quantile(0.5, "mlpipe_train_step_duration_seconds"),
                "p99": quantile(0.99, "mlpipe_train_step_duration_seconds"),
            },
        ),
        curve(
            "Where the time goes",
            about(
                "Parts of the step time, over all ranks: own work, and what it stood still for.",
                "forward, backward and update fill nearly all.",
                "Data, waits for others: see the ranks below. Stall: save less often, or in the background.",
                "MlpipeDataStarved",
            ),
            "percentunit",
            {
                "forward, backward, update": share("mlpipe_train_compute_seconds_total"),
                "waits for other ranks": share("mlpipe_train_collective_wait_seconds_total"),
                "waits for other stages": share("mlpipe_train_bubble_seconds_total"),
                "nodes left or joined": share("mlpipe_train_membership_seconds_total"),
                "data": share("mlpipe_train_data_wait_seconds_total"),
                "checkpoint stall": share("mlpipe_checkpoint_stall_seconds_total"),
            },
            width=24,
            stacked=True,
        ),
        curve(
            "Nodes of an elastic training",
            about(
                "How many nodes computed the last step; empty for a training that is not elastic.",
                "As many as are wanted.",
                "Fewer: `mlpipe status` says who left and why, the report what it cost.",
            ),
            "short",
            {"{{stage}}": f"max by (stage) (mlpipe_train_replicas{{{RUNS}}})"},
            width=24,
        ),
        curve(
            "Times less is sent",
            about(
                "Bytes of whole gradients in fp32, over those that rank 0 sent; of `compress` and `update`"
                " alone.",
                "what docs/how-to/slow-links.md says of the method; with `update` times `sync_every`.",
                "1 or less: the method sends no less than the gradients as they are.",
            ),
            "short",
            {"{{stage}}": f"{plain} / {sent}"},
            width=12,
        ),
        curve(
            "Time that compress saves, at most",
            about(
                "Share of a step that it would last longer, had the bytes not sent taken as long as those"
                " sent, and none been hidden. `mlpipe plan --explain` weighs what would be hidden.",
                "close to what `mlpipe plan --explain` says.",
                "Near 0: the link is fast enough, and `compress` costs more than it saves. With `update` it"
                " is too much: waits for others in every step are not for what is sent.",
            ),
            "percentunit",
            {"{{stage}}": f"1 - {step} / ({step} + {waits} * ({plain} / {sent} - 1))"},
            width=12,
        ),
    ]
    ranks = [
        heat(
            "Own work of each rank",
            about(
                "Part of the step time in the rank's own forward, backward and update; one row a rank.",
                "all rows alike.",
                "One darker row is a slow rank: the others wait for it.",
                "MlpipeStraggler",
            ),
            "percentunit",
            "{{stage}} {{rank}}",
            share("mlpipe_train_compute_seconds_total", "stage, rank"),
        ),
        curve(
            "Straggler score",
            about(
                "Own time of a rank (data and compute) over the median of all ranks, of a pipeline those of"
                " its stage; the five highest.",
                "1 on every rank.",
                "Above 1.2 the named rank holds up all others: look at its node and GPU.",
                "MlpipeStraggler",
            ),
            "none",
            {"{{stage}} rank {{rank}}": f"topk(5, {straggler()})"},
            low_is_good(1.1, 1.2),
            width=12,
        ),
        heat(
            "Data wait of each rank",
            about(
                "Part of the step time that the rank waits for its next batch; one row a rank.",
                "pale throughout.",
                "All rows dark: the loader or the store is slow. One: its node is.",
                "MlpipeDataStarved",
            ),
            "percentunit",
            "{{stage}} {{rank}}",
            share("mlpipe_train_data_wait_seconds_total", "stage, rank"),
        ),
        curve(
            "Longest data waits",
            about(
                "The five ranks that wait longest for their next batch, as parts of the step time.",
                "below 5 %.",
                "Above 20 % an alert is raised when it is so over all ranks.",
                "MlpipeDataStarved",
            ),
            "percentunit",
            {"rank {{rank}}": f"topk(5, {share('mlpipe_train_data_wait_seconds_total', 'rank')})"},
            WAIT_STEPS,
            width=12,
        ),
    ]
    experts = [
        heat(
            "Load of the fullest expert of each layer",
            about(
                "Tokens of a layer's fullest expert in about the last 20 steps, over the mean of the layer;"
                " one row a layer. Nothing for models without experts.",
                "it falls in the first hundred steps, and stays below 1.5.",
                "A row that stays dark: raise balance_rate. With ep the fullest worker is waited for.",
            ),
            "none",
            "{{stage}} layer {{layer}}",
            f"max by (stage, layer) (mlpipe_train_expert_max_average_load_ratio{{{RUNS}}})",
        ),
        curve(
            "Experts by load",
            about(
                "How many experts, over all layers, had at most so many times the mean of their layer, and"
                " more than the bound before.",
                "nearly all between 0.75 and 1.5.",
                "Many at 0.25: they learn nothing; raise balance_rate, or take fewer experts.",
            ),
            "short",
            {
                "{{stage}} up to {{at_most}}": "max by (stage, at_most)"
                f" (mlpipe_train_experts_by_load_ratio{{{RUNS}}})"
            },
            width=12,
        ),
        curve(
            "Dropped by full experts",
            about(
                "Of the tokens' ways to experts, over all layers, those for which a `capacity_factor` left no"
                " room. Nothing without one.",
                "below 5 %, once experts are balanced.",
                "More of it: raise capacity_factor, or balance_rate; padding takes places, too.",
            ),
            "percentunit",
            {"{{stage}}": f"max by (stage) (mlpipe_train_expert_dropped_ratio{{{RUNS}}})"},
            width=12,
        ),
    ]
    spent = f"sum by (bucket) (mlpipe_run_rank_seconds{{{RUNS}}})"
    worth = [
        number(
            "Goodput",
            about(
                "Share of the rank-seconds, from the first submission on, in steps that are kept. From the"
                " exporter, which reads the store once a minute; it stays when the run is over.",
                "0.9 and more for runs of hours.",
                "The panel beside it says where the rest went.",
            ),
            "percentunit",
            {"{{run}}": f"max by (run) (mlpipe_run_goodput_ratio{{{RUNS}}})"},
            high_is_good(0.7, 0.9),
            width=6,
        ),
        number(
            "Cost so far",
            about(
                "Rank-hours times the price of a device-hour in the plan. Nothing where no price is known.",
                "what `mlpipe plan` said.",
                "More: look at the badput.",
            ),
            "currencyUSD",
            {"{{run}}": f"max by (run) (mlpipe_run_cost_usd{{{RUNS}}})"},
            width=6,
            decimals=2,
        ),
        number(
            "Cost of badput",
            about(
                "Of the cost, what was not paid for steps that are kept.",
                "below a tenth of the cost.",
                "The panel beside it says what to mend.",
            ),
            "currencyUSD",
            {"{{run}}": f"max by (run) (mlpipe_run_badput_usd{{{RUNS}}})"},
            width=6,
            decimals=2,
        ),
        number(
            "Cost of a million tokens",
            about(
                "Cost over tokens of steps that are kept.",
                "steady.",
                "It rises with lost work and with low MFU.",
            ),
            "currencyUSD",
            {"{{run}}": f"max by (run) (mlpipe_run_usd_per_million_tokens{{{RUNS}}})"},
            width=6,
            decimals=3,
        ),
        curve(
            "Step time, predicted beside measured",
            about(
                "Median of the steps after the warm-up, from the exporter, beside what `mlpipe plan` said.",
                "within a quarter of each other.",
                "Measured far above: see MFU and the straggler score; on new hardware calibrate the planner.",
            ),
            "s",
            {"{{stage}} {{kind}}": f"max by (stage, kind) (mlpipe_run_step_seconds{{{RUNS}}})"},
        ),
        curve(
            "Memory, predicted beside measured",
            about(
                "Peak of the fullest rank (on CPU of its process), from the exporter, beside the plan's.",
                "within a tenth of each other.",
                "Measured far above: a model or data set of your own holds more than the plan knows.",
            ),
            "bytes",
            {"{{stage}} {{kind}}": f"max by (stage, kind) (mlpipe_run_memory_bytes{{{RUNS}}})"},
        ),
        curve(
            "Cost, predicted beside measured",
            about(
                "Measured: all that was paid so far; predicted: the steps that are done, at the plan's step"
                " time. Nothing where no price is known.",
                "measured a little above: starts and saves cost too.",
                "Far above: see the badput, then the step time.",
            ),
            "currencyUSD",
            {"{{stage}} {{kind}}": f"max by (stage, kind) (mlpipe_run_training_cost_usd{{{RUNS}}})"},
        ),
        curve(
            "Rank-seconds by what they went into",
            about(
                "Each rank-second since the first submission is in one of these; the list stands in"
                " docs/reference/metrics.md.",
                "compute and communication fill nearly all.",
                "lost, hang: see the log's restarts. queue: the cluster is full. startup, init: keep images"
                " and data near.",
            ),
            "s",
            {"{{bucket}}": spent},
            width=24,
        ),
    ]
    save = "mlpipe_checkpoint_duration_seconds"
    checkpoints = [
        number(
            "Time of a save",
            about(
                "Median and 99th percentile from start to commit, over the time range of the board.",
                "well below the interval between two saves.",
                "Longer: the store is slow. Nothing is shown before the first save.",
            ),
            "s",
            {
                "p50": quantile(0.5, save, "$__range", "increase"),
                "p99": quantile(0.99, save, "$__range", "increase"),
            },
            width=6,
        ),
        number(
            "Size of a checkpoint",
            about(
                "What all ranks wrote of the last one.",
                "constant.",
                "Times `keep` it is what the run holds in its store.",
            ),
            "bytes",
            {"{{stage}}": f"sum by (stage) (mlpipe_checkpoint_bytes{{{RUNS}}})"},
            width=6,
        ),
        number(
            "Failed saves",
            about(
                "Saves in the time range of the board that were not committed.",
                "none.",
                "The last good checkpoint is kept; look at the store.",
                "MlpipeCheckpointFailing",
            ),
            "short",
            {"{{stage}}": f"sum by (stage) (increase(mlpipe_checkpoint_failures_total{{{RUNS}}}[$__range]))"},
            ((None, "green"), (0.5, "red")),
            width=6,
            decimals=0,
        ),
        number(
            "Stall by checkpoints",
            about(
                "Part of the step time that training stood still to hand over a checkpoint.",
                "below 1 %.",
                "More: save asynchronously, or less often.",
            ),
            "percentunit",
            {"{{stage}}": share("mlpipe_checkpoint_stall_seconds_total", "stage")},
            low_is_good(0.01, 0.05),
            width=6,
        ),
    ]
    gpu = [
        curve(
            "Peak GPU memory of each rank",
            about(
                "The most that this rank's process has allocated so far; the five highest. Absent on CPU.",
                "near the plan's number, with room to the device's size.",
                "Close to the size: a smaller micro-batch, activation checkpointing, another strategy.",
            ),
            "bytes",
            {
                "rank {{rank}}": "topk(5, max by (rank)"
                f' (mlpipe_train_gpu_memory_bytes{{{RUNS}, kind="peak"}}))'
            },
        ),
        curve(
            "Tensor cores active",
            about(
                "Ratio of cycles in which the tensor pipe works. Needs DCGM's exporter with pod labels.",
                "it follows MFU.",
                "Low with a high GPU utilization: kernels that are not matrix products.",
            ),
            "percentunit",
            {"{{pod}} GPU {{gpu}}": dcgm("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")},
        ),
        curve(
            "GPU power",
            about(
                "As DCGM's exporter reports it.",
                "equal on all GPUs and steady.",
                "One below the others: it waits, or it is throttled.",
            ),
            "watt",
            {"{{pod}} GPU {{gpu}}": dcgm("DCGM_FI_DEV_POWER_USAGE")},
        ),
        curve(
            "GPU power by rank",
            about(
                "As NVIDIA's library tells the rank itself: no DCGM is needed, but nvidia-ml-py.",
                "equal on all ranks and steady.",
                "One below the others: it waits, or it is throttled.",
            ),
            "watt",
            {"rank {{rank}}": f"max by (rank) (mlpipe_gpu_power_watts{{{RUNS}}})"},
        ),
        curve(
            "GPU temperature by rank",
            about("By the same way.", "below 80 degrees.", "Above 85 the GPU slows down."),
            "celsius",
            {"rank {{rank}}": f"max by (rank) (mlpipe_gpu_temperature_celsius{{{RUNS}}})"},
            low_is_good(80, 85),
        ),
        curve(
            "GPU throttled",
            about(
                "1 while a rank's clocks are held down for that reason; by the same way.",
                "power_cap at most.",
                "thermal, hw_*: tell whoever runs the machines.",
                "MlpipeStraggler",
            ),
            "short",
            {"rank {{rank}} {{reason}}": f"max by (rank, reason) (mlpipe_gpu_throttled{{{RUNS}}})"},
        ),
    ]
    return fill(
        made,
        {
            "State": state,
            "Learning": learning,
            "Speed": speed,
            "Ranks": ranks,
            "Experts": experts,
            "Goodput and cost": worth,
            "Checkpoints": checkpoints,
            "GPU": gpu,
        },
    )
