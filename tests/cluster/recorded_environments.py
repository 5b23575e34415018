"""Environments of tasks as launchers gave them: of task 1 of 2, the variables that tell anything about its place.

Those of srun are Slurm 22.05's, mpiexec's are MPICH 5.0's and Open MPI 5.0's, all recorded from a run; those of PALS,
Kubernetes and Ray are what their documentation says.
"""

SRUN = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_GTIDS": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASK_PID": "16196",
}
SRUN_WITH_PMI2 = {**SRUN, "PMI_FD": "14", "PMI_JOBID": "17.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
SLURM_BATCH_SCRIPT = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASK_PID": "16245",
}
# The shell of salloc, where Slurm starts it on the job's first node (LaunchParameters=use_interactive_step).
SLURM_INTERACTIVE_SHELL = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}
OPEN_MPI = {
    "OMPI_COMMAND": "python",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-15951@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
# Its daemons were started by srun, one on each node; their tasks inherit the daemons' variables.
OPEN_MPI_IN_SLURM = {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", **OPEN_MPI}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MPICH_ON_TWO_HOSTS = {**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
PALS = {  # on one host
    "PALS_APID": "5d4e1f0a-9f0e",
    "PALS_NODEID": "0",
    "PALS_RANKID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
PMI_ALONE = {"PMI_FD": "11", "PMI_RANK": "1", "PMI_SIZE": "2"}
KUBERNETES = {
    "HOSTNAME": "train-1",
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
RAY = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "812", "RAY_NODE_ID": "5f", "OMP_NUM_THREADS": "1"}
# Ray's daemons were started by srun, one on each node.
RAY_IN_SLURM = {**SRUN, **RAY}
