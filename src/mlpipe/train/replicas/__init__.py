"""An elastic training: replicas of the model that come and go while the others go on.

`membership.py` decides who takes part (no I/O), `coordinator.py` serves it over TCP, `supervisor.py` runs
both and the launchers of the replicas on this machine; all of them without torch. In each rank `member.py` is
the connection to the coordinator, `exchange.py` sums and sends, `replicas.py` takes part and heals,
`elastic_loop.py` is the loop.
"""
