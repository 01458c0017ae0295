"""Sample clients beside a bundle, for its page to begin with: images, labels and what is known.

samples.bin    points as stored, one client after the other
samples.json   for each client its name, number of points, labels (-1: unknown) and traits
"""

import json
from collections.abc import Sequence

from flowdup.data.clients import ClientData

POINTS, ABOUT = "samples.bin", "samples.json"


def sample_files(clients: Sequence[ClientData]) -> dict[str, bytes]:
    """Both files' names and content; no files without clients.

    Beware: whoever gets the bundle gets these clients' data, so take none that are private.
    """
    if not clients:
        return {}
    listed = [
        {
            "name": client.name or f"client-{number}",
            "points": len(client),
            "labels": client.labels.tolist(),
            "traits": client.traits,
        }
        for number, client in enumerate(clients)
    ]
    points = b"".join(client.x.contiguous().numpy().tobytes() for client in clients)
    return {POINTS: points, ABOUT: json.dumps({"clients": listed}).encode()}
