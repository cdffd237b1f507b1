"""The backend `kubernetes`: a stage is a JobSet or a Job with its ConfigMap; the driver is a small Job."""
