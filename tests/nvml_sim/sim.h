/* Layout of the state file shared by the simulated driver library (sim.c) and the tests that steer it (layout.py).
 *
 * Both sides map the same file. Natural alignment on LP64 is assumed; test_nvml_sim.py compares every offset. */
#ifndef SIM_H
#define SIM_H

#include <stdint.h>

#define SIM_MAGIC 0x4d49534c4d564e53ull /* "SNVMLSIM", little endian */
#define SIM_VERSION 2u

#define SIM_MAX_DEVICES 16
#define SIM_MAX_MIG 8
#define SIM_MAX_PROCESSES 256
#define SIM_MAX_EVENTS 64
#define SIM_MAX_FIELDS 32
#define SIM_MAX_RETIRED 64
#define SIM_MAX_ACCOUNTED 32

#define SIM_NOT_AVAILABLE UINT64_MAX /* NVML_VALUE_NOT_AVAILABLE of a 64-bit value */
#define SIM_NO_INSTANCE UINT32_MAX   /* gpuInstanceId and computeInstanceId outside MIG */

/* A family is the unit of faults and counters: the functions a monitor would treat as one question. */
#define SIM_FAMILIES(X)                                                                                               \
    X(INIT) X(SHUTDOWN) X(SYSTEM) X(COUNT) X(HANDLE) X(IDENTITY) X(MEMORY) X(BAR1)                                    \
    X(COMPUTE_PROCESSES) X(GRAPHICS_PROCESSES) X(MPS_PROCESSES) X(PROCESS_DETAIL) X(PROCESS_UTILIZATION)              \
    X(UTILIZATION) X(TEMPERATURE) X(POWER) X(POWER_LIMIT) X(ENERGY) X(PERFORMANCE_STATE) X(CLOCKS)                    \
    X(ECC_ERRORS) X(ECC_MODE) X(RETIRED_PAGES) X(REMAPPED_ROWS) X(FIELD_VALUES) X(ACCOUNTING) X(VIRTUALIZATION)       \
    X(NUMA_NODE) X(ADDRESSING) X(MIG) X(EVENTS) X(EVENT_WAIT) X(PROCESS_NAME) X(CONF_COMPUTE)

#define SIM_FAMILY_CONSTANT(name) SIM_##name,
enum sim_family { SIM_FAMILIES(SIM_FAMILY_CONSTANT) SIM_FAMILY_COUNT };

enum sim_process_kind { SIM_COMPUTE = 1, SIM_GRAPHICS = 2, SIM_MPS = 4 };

enum sim_option {
    SIM_HANDLES_DIE_AT_INIT = 1, /* a handle of before shutdown + init answers INVALID_ARGUMENT */
    SIM_MIG_HANDLES_REUSED = 2,  /* a handle of a destroyed slice reads the next slice in that slot */
    SIM_LIBRARY_PINNED = 4,      /* a process that has seen another driver version gets LIB_RM_VERSION_MISMATCH */
};

struct sim_fault {
    int32_t code;      /* returned while `remaining` is not 0 */
    int32_t remaining; /* calls still to fail; -1 = until cleared */
    uint32_t delay_ms; /* every call sleeps this long first */
    uint32_t hang;     /* calls wait for as long as this is not 0 */
};

struct sim_counters {
    uint64_t calls[SIM_FAMILY_COUNT];
    uint32_t inflight[SIM_FAMILY_COUNT];
};

struct sim_process {
    uint32_t pid;
    uint32_t kinds;  /* bits of enum sim_process_kind */
    uint32_t hidden; /* holds memory, but the library does not list it (another container) */
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t sm_percent;
    uint32_t memory_percent;
    uint32_t encoder_percent;
    uint32_t decoder_percent;
    uint32_t reserved;
    uint64_t used;         /* bytes, or SIM_NOT_AVAILABLE */
    uint64_t cc_protected; /* bytes, or SIM_NOT_AVAILABLE */
    uint64_t sampled_us;   /* time of the utilisation sample; 0 = none */
    char name[64];
};

struct sim_mig {
    uint32_t present;
    uint32_t generation; /* grows with every slice made in this slot */
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t multiprocessors;
    uint32_t gpu_slices;
    uint32_t compute_slices;
    uint32_t reserved_;
    uint64_t total;
    uint64_t reserved;
    uint64_t used;
    char uuid[96];
    struct sim_fault faults[SIM_FAMILY_COUNT];
};

struct sim_field {
    uint32_t id;
    uint32_t scope;
    int32_t code; /* nvmlReturn of this field */
    uint32_t type;
    uint64_t bits; /* the value union */
};

struct sim_retired_page {
    uint64_t address;
    uint64_t timestamp;
    uint32_t cause; /* 0 = multiple single bit errors, 1 = double bit error */
    uint32_t reserved;
};

struct sim_accounted {
    uint32_t pid;
    uint32_t gpu_percent;
    uint32_t memory_percent;
    uint32_t running;
    uint64_t max_memory;
    uint64_t time_ms;
    uint64_t started_us;
};

struct sim_device {
    uint32_t present;       /* counted and indexed; 0 = not there */
    uint32_t generation;    /* grows when another GPU takes the slot */
    int32_t lost_code;      /* what every call answers; 0 = the GPU works */
    int32_t absent_code;    /* what a handle answers while `present` is 0 */
    uint64_t unsupported;   /* bit per family: NOT_SUPPORTED */
    char uuid[96];
    char name[96];
    char serial[64];        /* empty = NOT_SUPPORTED */

    uint32_t pci_domain;
    uint32_t pci_bus;
    uint32_t pci_device;
    uint32_t pci_device_id;
    uint32_t pci_subsystem_id;
    uint32_t minor;

    uint32_t mig_current;
    uint32_t mig_pending;
    uint32_t mig_max;       /* 0 = the GPU has no MIG */
    uint32_t reserved_;

    uint64_t total;         /* v2.used = used; v1.used = used + reserved; free = the rest */
    uint64_t reserved;
    uint64_t used;
    uint64_t bar1_total;
    uint64_t bar1_used;

    uint32_t gpu_percent;
    uint32_t memory_percent;
    uint32_t temperature;
    uint32_t memory_temperature;
    uint32_t power_mw;
    uint32_t power_limit_mw;
    uint32_t performance_state;
    uint32_t virtualization_mode;
    uint64_t energy_mj;
    uint64_t clock_reasons;

    uint32_t ecc_current;
    uint32_t ecc_pending;
    uint64_t ecc_errors[2][2]; /* [uncorrected][aggregate] */
    uint32_t remapped_correctable;
    uint32_t remapped_uncorrectable;
    uint32_t remapped_pending;
    uint32_t remapped_failure;
    uint32_t recovery_action;
    uint32_t numa_node;
    uint32_t addressing_mode; /* 0 none, 1 HMM, 2 ATS */
    uint32_t retired_pending;

    uint32_t retired_count;
    uint32_t field_count;
    uint32_t accounting_mode;
    uint32_t accounting_buffer;
    uint32_t accounted_count;
    uint32_t process_count;
    uint32_t grow_by;        /* processes that appear after a size probe */
    int32_t grow_remaining;  /* probes that still do so; -1 = all */
    uint32_t grown;          /* appeared so far; written by the library */
    uint32_t reserved2_;

    struct sim_retired_page retired[SIM_MAX_RETIRED];
    struct sim_field fields[SIM_MAX_FIELDS];
    struct sim_accounted accounted[SIM_MAX_ACCOUNTED];
    struct sim_process processes[SIM_MAX_PROCESSES];
    struct sim_mig mig[SIM_MAX_MIG];
    struct sim_fault faults[SIM_FAMILY_COUNT];
    struct sim_counters counters; /* calls on this GPU and on its slices; written by the library */
};

struct sim_event {
    uint32_t device; /* slot */
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t reserved;
    uint64_t type;
    uint64_t data;
};

struct sim_state {
    uint64_t magic;
    uint32_t version;
    uint32_t size;
    uint32_t sequence;   /* odd while a test is writing */
    uint32_t driver_gen; /* grows with every driver reload */
    int32_t stale_code;  /* answer to a process initialised before the reload */
    uint32_t options;    /* bits of enum sim_option */
    int32_t cuda_version;
    uint32_t opened; /* times some process went from no initialisation to one; written by the library */
    uint32_t closed; /* and back; written by the library */
    uint32_t reserved_;
    uint64_t event_count; /* event n is events[n % SIM_MAX_EVENTS] */
    char driver_version[96];
    char nvml_version[96];
    struct sim_event events[SIM_MAX_EVENTS];
    struct sim_fault faults[SIM_FAMILY_COUNT]; /* of calls on any GPU or none */
    struct sim_counters counters;              /* all calls; written by the library */
    struct sim_device devices[SIM_MAX_DEVICES];
};

#endif
