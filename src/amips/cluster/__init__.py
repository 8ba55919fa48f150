"""Ray behind one door: work on the machines of a cluster, in a bounded number of tasks at a time.

Nothing here knows of keys or queries. A room that has much to do is given a `Cluster` and hands it functions
of its own; where there is none, it does the work itself. ray is imported when a cluster is first asked for.
"""

from amips.cluster.connecting import check_address, connected, join
from amips.cluster.tasks import Cluster, Job
from amips.cluster.trainers import run_together

__all__ = ["Cluster", "Job", "check_address", "connected", "join", "run_together"]
