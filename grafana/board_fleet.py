"""The board of all trainings that run now."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    LAST_SAVE,
    LAST_STEP,
    MFU_STEPS,
    PROGRESS,
    RUNS,
    WAIT_STEPS,
    about,
    board,
    curve,
    fill,
    high_is_good,
    low_is_good,
    mfu,
    number,
    rate,
    rows,
    share,
)

from mlpipe.observe.buckets import GOOD, STOPPED

STORE = 'namespace=~"$namespace"'


def fleet_board() -> Dashboard:
    made = board(
        "mlpipe-fleet",
        "mlpipe / Fleet",
        "All trainings whose processes are scraped now; and, from `mlpipe exporter`, the runs of the store,"
        " those that wait and are over too.",
    )
    ranks = f"count(mlpipe_run_info{{{RUNS}}})"
    head = [
        number(
            "Runs training",
            about(
                "Runs with at least one rank that answers.",
                "what you expect.",
                "Fewer: `mlpipe list` says which run waits or has failed.",
            ),
            "short",
            {"runs": f"count(count by (namespace, run) (mlpipe_run_info{{{RUNS}}}))"},
            decimals=0,
        ),
        number(
            "Ranks training",
            about(
                "Ranks that answer; one a GPU.",
                "near the number of GPUs that you pay for.",
                "Fewer: GPUs stand idle.",
            ),
            "short",
            {"ranks": ranks},
            decimals=0,
        ),
        number(
            "Rank-hours",
            about(
                "Time that ranks were running, summed over ranks and the board's time range, by the minute.",
                "near GPUs times hours.",
                "Less: GPUs stood idle.",
            ),
            "short",
            {"rank-hours": f"sum_over_time({ranks}[$__range:1m]) / 60"},
            decimals=2,
        ),
        number(
            "MFU of the fleet",
            about(
                "FLOPs needed by all models over what all devices could do.",
                "0.35 and more on GPUs.",
                "The table shows which run is low.",
                "MlpipeMfuDropped",
            ),
            "percentunit",
            {"MFU": mfu()},
            MFU_STEPS,
        ),
        number(
            "Share of time computing",
            about(
                "Seconds in the ranks' own forward, backward and update over seconds that ranks ran.",
                "0.8 and more.",
                "Less: start-up, waits for data and for other ranks, checkpoints.",
            ),
            "percentunit",
            {"compute": f"{rate('mlpipe_train_compute_seconds_total')} / {ranks}"},
            high_is_good(0.5, 0.8),
        ),
        number(
            "Alerts firing",
            about(
                "Of mlpipe's rules; 0 also where the rules are not loaded.",
                "none.",
                "Each alert names its runbook.",
            ),
            "short",
            {"alerts": 'count(ALERTS{alertname=~"Mlpipe.+", alertstate="firing"}) or vector(0)'},
            ((None, "green"), (1, "red")),
            decimals=0,
        ),
    ]
    by = "namespace, run, stage"
    listing = [
        rows(
            "Runs",
            about(
                "Every training, a line a stage.",
                "green throughout.",
                "Red: open the run's board; its panels name the runbook.",
            ),
            "run",
            {
                "Progress": (PROGRESS.format(by, RUNS), "percentunit", ((None, "text"),)),
                "Tokens/s": (rate("mlpipe_train_tokens_total", by), "short", ((None, "text"),)),
                "MFU": (mfu(by), "percentunit", MFU_STEPS),
                "Since the last step": (LAST_STEP.format(by, RUNS), "s", low_is_good(120, 600)),
                "Since the last checkpoint": (LAST_SAVE.format(by, RUNS), "s", low_is_good(1800, 3600)),
                "Data wait": (share("mlpipe_train_data_wait_seconds_total", by), "percentunit", WAIT_STEPS),
            },
        )
    ]
    curves = [
        curve(
            "Tokens per second by run",
            about("Over all ranks of a run.", "flat.", "A drop: see that run's time breakdown."),
            "short",
            {"{{run}} {{stage}}": rate("mlpipe_train_tokens_total", "run, stage")},
        ),
        curve(
            "MFU by run",
            about(
                "The quotient of sums.",
                "0.35 and more on GPUs for large dense models.",
                "Compare runs of like models only.",
                "MlpipeMfuDropped",
            ),
            "percentunit",
            {"{{run}} {{stage}}": mfu("run, stage")},
            MFU_STEPS,
        ),
        curve(
            "Ranks by run",
            about(
                "Ranks that answer.",
                "flat while a run trains.",
                "A dent is a restart.",
                "MlpipeRankNotScraped",
            ),
            "short",
            {"{{run}} {{stage}}": f"count by (run, stage) (mlpipe_run_info{{{RUNS}}})"},
        ),
        curve(
            "Data wait by run",
            about(
                "Part of the step time.",
                "below 5 %.",
                "Above 20 % the loader or the store is too slow.",
                "MlpipeDataStarved",
            ),
            "percentunit",
            {"{{run}} {{stage}}": share("mlpipe_train_data_wait_seconds_total", "run, stage")},
            WAIT_STEPS,
            width=12,
        ),
        curve(
            "Failed saves by run",
            about(
                "Saves not committed in the last hour.",
                "none.",
                "Several runs at once: the store is ill.",
                "MlpipeCheckpointFailing",
            ),
            "short",
            {
                "{{run}} {{stage}}": "sum by (run, stage)"
                f" (increase(mlpipe_checkpoint_failures_total{{{RUNS}}}[1h]))"
            },
            ((None, "green"), (0.5, "red")),
            width=12,
        ),
    ]
    every = f"mlpipe_fleet_rank_seconds{{{STORE}}}"
    paid = f'device="cuda", bucket!="{STOPPED}"'
    kept = f'mlpipe_fleet_rank_seconds{{{STORE}, bucket=~"{"|".join(GOOD)}"}}'
    past = [
        number(
            "Runs by state",
            about(
                "Of the store.", "none that waits for long.", "`mlpipe status RUN` says what one waits for."
            ),
            "short",
            {"{{state}}": f"max by (state) (mlpipe_fleet_runs{{{STORE}}})"},
            width=6,
            decimals=0,
        ),
        number(
            "Goodput of the store's runs",
            about(
                "Share of all rank-seconds in steps that are kept.",
                "0.9 and more.",
                "The panel below says where the rest went.",
            ),
            "percentunit",
            {"goodput": f"sum({kept}) / sum({every})"},
            high_is_good(0.7, 0.9),
        ),
        number(
            "GPU-hours of trainings",
            about(
                "Rank-hours on CUDA devices; on machines without any, 0.",
                "what you paid for.",
                "Less: devices stood idle outside of runs.",
            ),
            "short",
            {"hours": f"(sum(mlpipe_fleet_rank_seconds{{{STORE}, {paid}}}) or vector(0)) / 3600"},
        ),
        number(
            "Cost of trainings",
            about(
                "Of all whose device has a price; and of that, badput.",
                "badput below a tenth.",
                "Sort the runs by mlpipe_run_badput_usd.",
            ),
            "currencyUSD",
            {
                "cost": f"sum(mlpipe_fleet_cost_usd{{{STORE}}})",
                "badput": f"sum(mlpipe_fleet_badput_usd{{{STORE}}})",
            },
            width=6,
            decimals=2,
        ),
        number(
            "Failed runs by cause",
            about(
                "not_finite, hang, out_of_memory and node_fault (of a preflight), else whose fault it "
                "was: failed (the run's own code or gate), infrastructure, input.",
                "none.",
                "Many of infrastructure: the cluster or the store is ill.",
                "MlpipeJobFailed",
            ),
            "short",
            {"{{cause}}": f"max by (cause) (mlpipe_fleet_failed_runs{{{STORE}}}) or vector(0)"},
            ((None, "text"),),
            decimals=0,
        ),
        number(
            "Runs that nobody drives",
            about(
                "Under way, and for how long their driver has been gone.",
                "none.",
                "`mlpipe status RUN` says why; `mlpipe resume RUN` goes on.",
                "MlpipeRunUndriven",
            ),
            "s",
            {"{{run}}": f"time() - max by (run) (mlpipe_run_undriven_timestamp_seconds{{{RUNS}}})"},
            low_is_good(60, 300),
            width=24,
        ),
        curve(
            "Where all rank-seconds went",
            about(
                "Of all trainings of the store that were read.",
                "compute and communication fill nearly all.",
                "The largest other one is what to mend first.",
            ),
            "s",
            {"{{bucket}}": f"sum by (bucket) ({every})"},
            width=24,
        ),
    ]
    return fill(made, {"Runs of the store": past, "Now": head, "Runs": listing, "Over time": curves})
