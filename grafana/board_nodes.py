"""The board of machines and GPUs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import RUNS, WAIT_STEPS, about, board, curve, dcgm, fill, low_is_good, share


def nodes_board() -> Dashboard:
    made = board(
        "mlpipe-nodes",
        "mlpipe / Nodes and GPUs",
        "Whether a machine or a GPU holds up the runs on it. `node` is set by the chart's PodMonitor; without"
        " it all ranks share one nameless node. The GPU panels need DCGM's exporter with pod labels.",
        nodes=True,
    )
    here = f'{RUNS}, node=~"$node"'
    wait = share("mlpipe_train_data_wait_seconds_total", "node", here)
    nodes = [
        curve(
            "Ranks on each node",
            about(
                "Ranks that answer.",
                "the node's GPUs.",
                "Fewer: a free place, or a pod that died.",
                "MlpipeRankNotScraped",
            ),
            "short",
            {"{{node}}": f"count by (node) (mlpipe_run_info{{{here}}})"},
        ),
        curve(
            "Since the last step by node",
            about(
                "Time since the node's ranks ended a step; the worst.",
                "not much more than the step time.",
                "One node alone: it hangs.",
                "MlpipeTrainingStalled",
            ),
            "s",
            {"{{node}}": f"time() - min by (node) (mlpipe_train_last_step_timestamp_seconds{{{here}}})"},
            low_is_good(120, 600),
        ),
        curve(
            "Data wait by node",
            about(
                "Part of the step time.",
                "below 5 % everywhere.",
                "One node: its disk or network.",
                "MlpipeDataStarved",
            ),
            "percentunit",
            {"{{node}}": wait},
            WAIT_STEPS,
        ),
    ]
    legend = "{{node}} GPU {{gpu}}"
    gpus = [
        curve(
            "GPU utilization",
            about(
                "Part of the time with any kernel on the GPU: occupancy only, not work.",
                "above 95 %.",
                "Less: the GPU waits for data, for the CPU or for other ranks.",
            ),
            "percentunit",
            {legend: f"({dcgm('DCGM_FI_DEV_GPU_UTIL', here)}) / 100"},
        ),
        curve(
            "Tensor cores active by GPU",
            about(
                "Ratio of cycles in which the tensor pipe works: the nearest to work done.",
                "it follows MFU.",
                "Low: kernels that are not matrix products, or waiting.",
            ),
            "percentunit",
            {legend: dcgm("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", here)},
        ),
        curve(
            "Memory bus active",
            about(
                "Ratio of cycles in which GPU memory is read or written.",
                "below 0.8 for large matrix products.",
                "High with idle tensor cores: memory-bound kernels; try compile.",
            ),
            "percentunit",
            {legend: dcgm("DCGM_FI_PROF_DRAM_ACTIVE", here)},
        ),
        curve(
            "GPU memory used",
            about(
                "By all processes, with what PyTorch caches.",
                "some GiB below the device's size.",
                "At the limit: the next allocation may fail.",
            ),
            "bytes",
            {legend: f"({dcgm('DCGM_FI_DEV_FB_USED', here)}) * 1048576"},
        ),
        curve(
            "GPU temperature",
            about(
                "Of the chip.",
                "below 80 degrees.",
                "Above 85 the GPU slows down: tell whoever runs the machines.",
            ),
            "celsius",
            {legend: dcgm("DCGM_FI_DEV_GPU_TEMP", here)},
            low_is_good(80, 85),
        ),
        curve(
            "Power of each GPU",
            about(
                "As DCGM's exporter reports it.",
                "equal on all GPUs and steady.",
                "One below the others: it waits, or it is throttled.",
            ),
            "watt",
            {legend: dcgm("DCGM_FI_DEV_POWER_USAGE", here)},
        ),
        curve(
            "Last XID error",
            about(
                "The last error code of the driver, kept for ever; 0: none yet.",
                "flat.",
                "A change is a new error.",
                "MlpipeGpuXid",
            ),
            "short",
            {legend: dcgm("DCGM_FI_DEV_XID_ERRORS", here)},
            width=24,
        ),
    ]
    return fill(made, {"Nodes": nodes, "GPUs": gpus})
