"""Check this machine and, as ranks of a job, all hosts of the job against each other; say what to change.

Vocabulary::

    finding     one line about one fact, with a level: ok, note, warning or problem; the last two have advice
    section     the findings about one subject: processors, shared memory, network, ...
    host        the ranks that have one network namespace: usually a machine, or a container
    leader      the lowest rank on a host, which checks that host and the ways from it to the others
    link        two hosts, or two ranks of one host, between which messages are measured

``machine`` has the checks of one host, ``job`` what all hosts do together, ``comparison`` and ``speed_comparison`` the
findings about hosts against each other, ``findings`` the report as text and as a JSON document. Facts of Linux are read
below a root directory that is a parameter, so that tests can write down hosts that do not exist.
"""
