# For type checkers: the functions that __init__.py imports when they are first used.
from phalanx.api import load_job as load_job
from phalanx.api import open_checkpoint as open_checkpoint
from phalanx.api import plan_layout as plan_layout
from phalanx.api import predict_step as predict_step
from phalanx.api import predict_traffic as predict_traffic
from phalanx.api import read_run as read_run
from phalanx.api import read_traffic as read_traffic
from phalanx.api import rehearse_job as rehearse_job
from phalanx.api import simulate_step as simulate_step
from phalanx.api import train_job as train_job
from phalanx.api import verify_layouts as verify_layouts

__version__: str
