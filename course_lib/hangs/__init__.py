"""Why a run stands still: the watchdog, each rank's state, and who is to blame."""
