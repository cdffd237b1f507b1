"""What plan.json says of a training. The class is the planner's, and every rank's: of an evaluation, too."""

from mlpipe.plan.work import TrainPlan

PLAN = TrainPlan
