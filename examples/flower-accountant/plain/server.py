"""FedAvg with Flower's central differential privacy; coterie keeps the account."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import (
    Grid,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
    ServerApp,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from coterie.flower import CoterieAccountant

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and certify what they spent."""
    settings = context.run_config
    clients = int(settings["clients"])
    config = PrivacyConfig(
        target_delta=1e-5,
        population_size=clients,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
        max_epsilon=float(settings["limit"]),
    )
    accountant = CoterieAccountant(config, folder=str(settings["account"]))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients),
        noise_multiplier=float(settings["noise"]),
        clipping_norm=1.0,
        num_sampled_clients=clients,
        accountant=accountant,
    )
    strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=int(settings["rounds"]))
    print(f"spent: {accountant.get_privacy_spent()}; check: coterie verify {accountant.certify()}")
